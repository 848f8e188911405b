//! Reports on the launches that the driver carried out: line coverage, counters.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_char;
use std::fmt::Write as _;
use std::path::Path;

use fmha_emu_ptx::{Kernel, LaunchConfig, Report, SourceLine, SourceMap};

use crate::launches::{self, Launches};
use crate::state::{device_count, state_of};

/// Observations so far.
#[derive(Debug, Default)]
pub(crate) struct Observer {
    /// Counters of the last launches.
    launches: Launches,
    /// Each source line that has code: whether that was executed.
    covered: BTreeMap<SourceLine, bool>,
    /// Observations by the address of the module's text, which the kernel kept beside holds in place.
    maps: HashMap<usize, (Kernel, SourceMap)>,
}

impl Observer {
    /// A launch has ended.
    pub(crate) fn note(&mut self, kernel: &Kernel, config: &LaunchConfig, report: &Report, units: u64) {
        let instructions = report.instructions.iter().map(|(name, hits)| (*name, *hits));
        let counters = report.counters.named();
        let [x, y, _] = config.grid.map(u64::from);
        let bytes = report.reads.iter().map(|(at, bytes)| {
            let [i, j, k] = at.map(u64::from);
            (i + x * (j + y * k), *bytes)
        });
        self.launches.push(
            kernel.name(),
            (config.grid, config.block),
            counters,
            instructions,
            (units, bytes),
        );
        if let Some(path) = std::env::var_os("FMHA_EMULATE_COVERAGE") {
            self.cover(kernel, report, Path::new(&path));
        }
    }

    /// Adds the launch's lines and rewrites the file when that told something new.
    fn cover(&mut self, kernel: &Kernel, report: &Report, path: &Path) {
        let key = kernel.source().as_ptr() as usize;
        let entry = self.maps.entry(key);
        let (_, map) = entry.or_insert_with(|| (kernel.clone(), SourceMap::of(kernel.source())));
        let mut news = false;
        for (&line, &hits) in &report.lines {
            for place in map.chain(line) {
                let known = self.covered.get(&place).copied();
                if known.is_none_or(|executed| !executed && hits > 0) {
                    self.covered.insert(place, hits > 0);
                    news = true;
                }
            }
        }
        if news {
            let mut text = String::new();
            for (place, executed) in &self.covered {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{} {} {}", place.file, place.line, u8::from(*executed));
            }
            if let Err(error) = std::fs::write(path, text) {
                eprintln!("emulated driver: {}: {error}", path.display());
            }
        }
    }
}

/// Extension of NVIDIA's interface: returns a JSON array of what the last launches (at most 64) did, oldest
/// first, one device after the other, and forgets them. The text is the caller's until [`fmha_emu_forget`].
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fmha_emu_launches() -> *mut c_char {
    launches::give((0..device_count()).flat_map(|device| state_of(device).observer.launches.take()))
}

/// Frees a text of [`fmha_emu_launches`].
///
/// # Safety
/// `text` came from there and is not used again.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fmha_emu_forget(text: *mut c_char) {
    // SAFETY: the caller keeps the contract of `fmha_emu_forget`.
    unsafe { launches::forget(text) }
}
