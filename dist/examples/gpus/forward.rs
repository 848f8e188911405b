//! Forward over ranks, compared with one device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fmha::{DevBuffer, FwdArgs};
use fmha_dist::{FwdPlan, Options, Problem, Scheme};

use crate::AnyError;
use crate::alone::Whole;
use crate::bench::{Bench, Trouble, Way};
use crate::groups::Marked;

impl Bench {
    pub(crate) fn forward(
        &self,
        name: &str,
        scheme: Scheme,
        problem: &Problem,
        options: &Options,
        whole: &Whole,
        alone: f64,
    ) -> Result<(), AnyError> {
        let marked = Arc::new(Marked::new(self.group.clone()));
        let mut plan = FwdPlan::new(problem, marked.clone(), &self.device, options)?;
        if self.is_first() {
            let text = plan.explain();
            text.lines()
                .filter(|line| line.starts_with("keys"))
                .for_each(|line| self.say(&format!("{name}: {line}")));
        }
        let rows = u64::from(self.queries.rows_of(self.group.rank()));
        let [q, k, v, _] = &whole.inputs;
        let q = self.own(&self.queries, q, 1, 32 * 256)?;
        let [k, v] = [self.own(&self.keys, k, 1, 8 * 256)?, self.own(&self.keys, v, 1, 8 * 256)?];
        let mut o = self.device.memory().alloc(rows * 32 * 256)?;
        let mut lse = self.device.memory().alloc(rows * 128)?;
        let mut run = |o: &mut DevBuffer| -> Result<(), AnyError> {
            let args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut()).score(self.score());
            Ok(plan.run(&mut args.lse(lse.slice_mut()), &self.stream)?)
        };
        if let Some(trouble) = self.trouble {
            return self.in_trouble(trouble, || run(&mut o));
        }
        let recording = if self.way == Way::Eager {
            None
        } else {
            // Connections are made by a run that is not recorded.
            run(&mut o)?;
            self.stream.synchronize()?;
            let recorded = |error: AnyError| fmha::Error::NoDevice(error.to_string());
            Some(self.stream.capture(|| run(&mut o).map_err(recorded))?)
        };
        // SAFETY: what the run names lives until the stream has done it, which is waited for below.
        let replay = |of: &fmha::Recording| Ok(unsafe { of.replay(&self.stream) }?);
        if let (Way::Parts, Some(recording)) = (self.way, &recording) {
            self.in_parts((name, alone), &marked, || run(&mut o), || replay(recording))?;
            self.stream.synchronize()?;
            return self.compare("O", &o, &self.queries, &whole.o, 32);
        }
        let mut call = |o: &mut DevBuffer| match &recording {
            None => run(o),
            Some(recording) => replay(recording),
        };
        let seconds = self.fastest(|| call(&mut o))?;
        self.stream.synchronize()?;
        self.report((name, scheme), (problem, options), (false, alone), seconds)?;
        self.compare("O", &o, &self.queries, &whole.o, 32)?;
        self.again(name, || {
            call(&mut o)?;
            self.stream.synchronize()?;
            self.download(&o, rows * 32 * 256)
        })
    }

    /// Prints the error that the other ranks get for a rank that is late or gone, and when.
    pub(crate) fn in_trouble(
        &self,
        trouble: Trouble,
        mut run: impl FnMut() -> Result<(), AnyError>,
    ) -> Result<(), AnyError> {
        run()?;
        self.stream.synchronize()?;
        self.group.share(&[])?;
        let start = Instant::now();
        let is_last = self.group.rank() + 1 == self.group.size();
        match trouble {
            Trouble::Slow if is_last => std::thread::sleep(self.group.timeout() * 2),
            Trouble::Dead if is_last => std::process::abort(),
            _ => {}
        }
        let queued = run();
        self.stream.synchronize()?;
        // The pause gives the device time to report a fault.
        std::thread::sleep(Duration::from_millis(200));
        let heard = queued.and_then(|()| run()).err().map_or("nothing".to_owned(), |error| error.to_string());
        let (rank, seconds) = (self.group.rank(), start.elapsed().as_secs_f64());
        println!(
            "{trouble:?}: rank {rank} heard after {seconds:.1} s of a timeout of {:?}: {heard}",
            self.group.timeout()
        );
        Ok(())
    }
}
