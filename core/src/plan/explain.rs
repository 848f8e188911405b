//! Facts about a plan before it runs: resources, launch, source of the code.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::roofline::Roofline;

/// Resources of a compiled kernel. `None`: the compiler did not report the value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ResourceUsage {
    /// Vector registers per thread, at launch.
    pub registers: Option<u32>,
    /// Bytes per thread that did not fit in registers: the larger of spill stores and spill loads.
    pub spill_bytes: Option<u32>,
    /// Bytes of local memory per thread, spills included.
    pub stack_bytes: Option<u32>,
    /// Bytes of shared memory that the kernel itself declares. [`LaunchShape::shared_bytes`] has what a launch
    /// adds.
    pub shared_bytes: Option<u32>,
}

impl fmt::Display for ResourceUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = [
            (self.registers, "registers a thread"),
            (self.spill_bytes, "bytes spilled"),
            (self.stack_bytes, "bytes of stack"),
            (self.shared_bytes, "bytes of static shared memory"),
        ];
        let known: Vec<String> =
            known.iter().filter_map(|(value, what)| Some(format!("{} {what}", (*value)?))).collect();
        f.write_str(&if known.is_empty() { "not known".to_owned() } else { known.join(", ") })
    }
}

/// Distribution of a launch over a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Groups of threads that share memory: thread blocks, workgroups.
    pub groups: u64,
    /// Threads of a group.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a group.
    pub shared_bytes: u32,
    /// Number of work items. They have equal sizes unless a mask shortens them.
    pub tiles: u64,
    /// Number of work items that the device processes at a time.
    pub tiles_at_once: u64,
}

impl LaunchShape {
    /// Tiles divided by tiles at once. A launch of 1.1 waves takes as long as one of 2.
    #[must_use]
    pub fn waves(&self) -> f64 {
        self.tiles as f64 / self.tiles_at_once.max(1) as f64
    }

    /// Share of the device's time that is spent on tiles, if all tiles take equal time.
    #[must_use]
    pub fn wave_efficiency(&self) -> f64 {
        let waves = self.waves();
        if waves > 0.0 { waves / waves.ceil() } else { 1.0 }
    }
}

/// Facts about a plan before it runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Explain {
    /// Resources of the kernel. `None` if kernels are not compiled one by one, or cannot be compiled on this host.
    pub resources: Option<ResourceUsage>,
    /// Launch of the kernel; `None` if there is none.
    pub launch: Option<LaunchShape>,
    /// Origin of the machine code, or why there is none; empty if kernels are not compiled one by one.
    pub code: String,
    /// Remarks of the compiler on what makes the kernel slower than intended, one per line; usually empty.
    pub remarks: String,
}

impl Explain {
    /// Prints the known facts, one on each line.
    pub(super) fn rows(&self, row: &mut impl FnMut(&str, &dyn fmt::Display) -> fmt::Result) -> fmt::Result {
        if let Some(launch) = self.launch {
            let (groups, threads, shared) = (launch.groups, launch.threads, launch.shared_bytes);
            row(
                "grid",
                &format_args!("{groups} of {threads} threads, {shared} bytes of shared memory each"),
            )?;
            let (tiles, waves) = (launch.tiles, launch.waves());
            row("waves", &format_args!("{waves:.2}: {tiles} tiles, {} at a time", launch.tiles_at_once))?;
        }
        if let Some(resources) = self.resources {
            row("resources", &resources)?;
        }
        if !self.code.is_empty() {
            row("code", &self.code)?;
        }
        for remark in self.remarks.lines() {
            row("compiler", &remark)?;
        }
        Ok(())
    }

    /// Modelled least time in seconds, at the device's peak rates, for this work. The last wave is as poorly filled
    /// as in this launch. `None` if a peak rate is unknown.
    #[must_use]
    pub fn modelled_seconds(&self, roofline: &Roofline, flops: u64, bytes: u64) -> Option<f64> {
        let compute = flops as f64 / roofline.flops_per_second?;
        let memory = bytes as f64 / roofline.bytes_per_second?;
        let efficiency = self.launch.map_or(1.0, |launch| launch.wave_efficiency());
        Some((compute / efficiency).max(memory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modelled_time_is_that_of_the_slower_side_and_an_idle_last_wave_costs_as_much_as_a_full_one() {
        let roofline =
            Roofline { flops_per_second: Some(2.0), bytes_per_second: Some(4.0), source: String::new() };
        let explain = Explain::default();
        assert_eq!(explain.modelled_seconds(&roofline, 10, 8), Some(5.0));
        assert_eq!(explain.modelled_seconds(&roofline, 10, 80), Some(20.0));
        assert_eq!(explain.modelled_seconds(&Roofline::default(), 10, 80), None);

        let launch = LaunchShape { groups: 4, threads: 1, shared_bytes: 0, tiles: 6, tiles_at_once: 4 };
        assert_eq!((launch.waves(), launch.wave_efficiency()), (1.5, 0.75));
        let explain = Explain { launch: Some(launch), ..explain };
        assert_eq!(explain.modelled_seconds(&roofline, 6, 8), Some(4.0));
        // A device of unknown size counts as running one tile at a time.
        assert_eq!(LaunchShape { tiles_at_once: 0, ..launch }.waves(), 6.0);
        // A launch without tiles leaves no multiprocessor idle.
        assert_eq!(LaunchShape { tiles: 0, ..launch }.wave_efficiency(), 1.0);
    }
}
