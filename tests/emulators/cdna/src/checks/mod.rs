//! Checks that are made while a kernel runs.

pub(crate) mod lds;
pub(crate) mod regs;

/// Which checks run. Accesses outside every allocation fault always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent switches")]
pub struct Checks {
    /// Registers read before they were written, per lane. Pure copies may carry undefined values, and so may private
    /// memory: what comes from it is as defined as what was put there.
    pub uninit_registers: bool,
    /// LDS read before it was written.
    pub uninit_lds: bool,
    /// Device memory read before it was written.
    pub uninit_memory: bool,
    /// Registers and LDS used before the `s_waitcnt` that makes them safe.
    pub waits: bool,
    /// LDS touched by two waves, one of them writing, with no barrier between.
    pub lds_races: bool,
    /// Waves that meet at different barriers, end while others wait, or reach one with lanes switched off.
    pub barriers: bool,
}

impl Checks {
    /// Every check.
    pub const ALL: Self = Self {
        uninit_registers: true,
        uninit_lds: true,
        uninit_memory: true,
        waits: true,
        lds_races: true,
        barriers: true,
    };
    /// No checks: the fast mode.
    pub const NONE: Self = Self {
        uninit_registers: false,
        uninit_lds: false,
        uninit_memory: false,
        waits: false,
        lds_races: false,
        barriers: false,
    };

    /// Whether registers or LDS are watched at all.
    pub(crate) fn any(self) -> bool {
        self.uninit_registers || self.uninit_lds || self.waits || self.lds_races
    }
}

impl Default for Checks {
    fn default() -> Self {
        Self::ALL
    }
}
