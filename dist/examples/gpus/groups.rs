//! Groups with additional behaviour, for measurements.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fmha::{DevSlice, DevSliceMut, Device, Event, MemorySpace, Stream};
use fmha_dist::{Error, Exchange, Group, Host, Result};

/// A group that marks on the stream where its gathers begin and end.
pub(crate) struct Marked {
    group: Arc<dyn Group>,
    /// Events that have been reached, and events to come; the last comes first.
    marks: Mutex<[Vec<[Event; 2]>; 2]>,
}

impl Marked {
    pub(crate) fn new(group: Arc<dyn Group>) -> Self {
        Self { group, marks: Mutex::default() }
    }

    /// Takes the marks of gathers since the last call, and sets the number of gathers to mark from now on.
    pub(crate) fn marks(&self, device: &Device, count: usize) -> Result<Vec<[Event; 2]>, fmha::Error> {
        let new = (0..count).map(|_| Ok([device.event()?, device.event()?]));
        let new = [Vec::new(), new.collect::<Result<_, fmha::Error>>()?];
        let [reached, _] =
            std::mem::replace(&mut *self.marks.lock().unwrap_or_else(PoisonError::into_inner), new);
        Ok(reached)
    }
}

impl Group for Marked {
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    fn size(&self) -> u32 {
        self.group.size()
    }

    fn space(&self) -> MemorySpace {
        self.group.space()
    }

    fn begins(&self, planned: &Arc<[(String, String)]>) -> Result<()> {
        self.group.begins(planned)
    }

    fn ends(&self) {
        self.group.ends();
    }

    fn calls(&self) -> u64 {
        self.group.calls()
    }

    fn share(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.group.share(mine)
    }

    fn exchange(
        &self,
        exchange: &Exchange,
        sources: &[DevSlice<'_>],
        sinks: &mut [DevSliceMut<'_>],
        stream: &Stream,
    ) -> Result<()> {
        self.group.exchange(exchange, sources, sinks, stream)
    }

    fn all_gather(&self, bytes: u64, all: &mut DevSliceMut<'_>, stream: &Stream) -> Result<()> {
        let said = |error: fmha::Error| Error::new(self.rank(), "event", error.to_string());
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        let Some([begins, ends]) = marks[1].pop() else {
            return self.group.all_gather(bytes, all, stream);
        };
        begins.record(stream).map_err(said)?;
        self.group.all_gather(bytes, all, stream)?;
        ends.record(stream).map_err(said)?;
        marks[0].push([begins, ends]);
        Ok(())
    }

    fn most_rows(&self) -> u64 {
        self.group.most_rows()
    }

    fn timeout(&self) -> Duration {
        self.group.timeout()
    }

    fn failure(&self) -> Option<Error> {
        self.group.failure()
    }

    fn fail(&self, error: Error) -> Error {
        self.group.fail(error)
    }
}

/// Ranks that plan for devices, and move nothing.
pub(crate) struct Planning(pub(crate) Host);

impl Group for Planning {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn size(&self) -> u32 {
        self.0.size()
    }

    fn space(&self) -> MemorySpace {
        MemorySpace::Device
    }

    fn share(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.0.share(mine)
    }

    fn exchange(
        &self,
        exchange: &Exchange,
        _sources: &[DevSlice<'_>],
        _sinks: &mut [DevSliceMut<'_>],
        _stream: &Stream,
    ) -> Result<()> {
        let text = format!("{} rows are planned, and not moved", exchange.rows());
        Err(Error::new(self.rank(), "exchange", text))
    }

    fn timeout(&self) -> Duration {
        self.0.timeout()
    }

    fn fail(&self, error: Error) -> Error {
        self.0.fail(error)
    }
}
