//! Available memory, checked before it is used: a problem that does not fit gives an error with the number instead
//! of an abort.

use std::fmt;

use fmha::Error;

use crate::failure::Failure;

/// Refuses `bytes` that exceed the system's free memory or this process' limits; `what` describes their use.
pub(super) fn room_for(what: &dyn fmt::Display, bytes: u128) -> Result<(), Failure> {
    if let Some(available) = available_bytes()
        && bytes > u128::from(available)
    {
        return Err(lack_of(what, bytes, format!("the system has {available} available")));
    }
    reservable(what, bytes)
}

/// Refuses `bytes` of address space that exceed this process' limits. The memory itself may never be needed, as for
/// stacks.
pub(super) fn reservable(what: &dyn fmt::Display, bytes: u128) -> Result<(), Failure> {
    let probe = usize::try_from(bytes).map_err(|error| lack_of(what, bytes, error.to_string()))?;
    // A limit of the process shows at the reservation; given back at once.
    Vec::<u8>::new().try_reserve_exact(probe).map_err(|error| lack_of(what, bytes, error.to_string()))
}

fn lack_of(what: &dyn fmt::Display, bytes: u128, text: String) -> Failure {
    Error::System { what: format!("memory for {what}, {bytes} bytes"), text }.into()
}

/// Bytes that Linux reports as free or can free, for the machine and for the control group; unknown on other
/// systems. Linux grants more than it has, and kills processes that use it.
fn available_bytes() -> Option<u64> {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(most, taken)| most.saturating_sub(taken));
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
    });
    machine.into_iter().chain(group).min()
}
