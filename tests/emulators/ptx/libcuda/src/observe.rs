//! What the driver tells of the launches it carried out: line coverage, counters.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::{CString, c_char};
use std::fmt::Write as _;
use std::path::Path;

use fmha_emu_ptx::{Kernel, LaunchConfig, Report, SourceLine, SourceMap};

use crate::state::{device_count, state_of};

/// Launches whose counters are kept until somebody asks.
const KEPT: usize = 64;

/// What has been seen so far.
#[derive(Debug, Default)]
pub(crate) struct Observer {
    /// Counters of the last launches, as JSON objects.
    launches: VecDeque<String>,
    /// Each source line that has code: whether that was executed.
    covered: BTreeMap<SourceLine, bool>,
    /// By the address of the module's text, which the kernel kept beside holds in place.
    maps: HashMap<usize, (Kernel, SourceMap)>,
}

impl Observer {
    /// A launch has ended.
    pub(crate) fn note(&mut self, kernel: &Kernel, config: &LaunchConfig, report: &Report) {
        if self.launches.len() == KEPT {
            self.launches.pop_front();
        }
        self.launches.push_back(json(kernel, config, report));
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

fn json(kernel: &Kernel, config: &LaunchConfig, report: &Report) -> String {
    let object = |pairs: &mut dyn Iterator<Item = (&'static str, u64)>| {
        let fields: Vec<String> = pairs.map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    };
    let counters = object(&mut report.counters.named().into_iter());
    let instructions = object(&mut report.instructions.iter().map(|(name, hits)| (*name, *hits)));
    let name = kernel.name().replace(['"', '\\'], "_");
    format!(
        "{{\"kernel\":\"{name}\",\"grid\":{:?},\"block\":{:?},\"counters\":{counters},\"instructions\":{instructions}}}",
        config.grid, config.block
    )
}

/// Not of NVIDIA's interface: what the last launches (at most 64) did, as a JSON array, oldest first, a device after the
/// other; asking forgets them. The text is the caller's until [`fmha_emu_forget`].
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fmha_emu_launches() -> *mut c_char {
    let of = |device| state_of(device).observer.launches.drain(..).collect::<Vec<_>>();
    let launches: Vec<String> = (0..device_count()).flat_map(of).collect();
    // The objects hold no zero byte: names and numbers.
    CString::new(format!("[{}]", launches.join(","))).unwrap_or_default().into_raw()
}

/// Frees a text of [`fmha_emu_launches`].
///
/// # Safety
/// `text` came from there and is not used again.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fmha_emu_forget(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller promises that `into_raw` made it, and that this is its last use.
        drop(unsafe { CString::from_raw(text) });
    }
}
