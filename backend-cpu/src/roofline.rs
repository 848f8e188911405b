//! Upper bound of this processor's speed, measured once, at first use.

use std::sync::OnceLock;
use std::time::Instant;

use fmha_core::Roofline;

use crate::isa::{Engine, Kernels};
use crate::tasks::Threads;

/// Peak rate, measured at first use.
#[derive(Default)]
pub(crate) struct Measured(OnceLock<Roofline>);

/// The processor's own name.
pub(crate) fn processor() -> String {
    std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        })
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

impl Measured {
    pub(crate) fn get(&self, engine: Engine, threads: &Threads) -> Roofline {
        self.0
            .get_or_init(|| {
                let mut states = vec![0.0f64; threads.count()];
                // All threads run at once, like the kernels, since cores share power and clocks.
                let tasks = states.len();
                threads.for_each(&mut states, tasks, |rate, _| {
                    let mut best = 0.0f64;
                    for _ in 0..8 {
                        let start = Instant::now();
                        let flops = engine.fma_loop();
                        best = best.max(flops / start.elapsed().as_secs_f64());
                    }
                    *rate = rate.max(best);
                });
                Roofline {
                    flops_per_second: Some(states.iter().sum()),
                    bytes_per_second: None,
                    source: "f32 FMA loop in registers, measured at first use, best of 8 on each thread at once; memory bandwidth not measured".into(),
                }
            })
            .clone()
    }
}
