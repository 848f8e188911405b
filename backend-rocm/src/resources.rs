//! What a code object says of its one kernel.

use fmha_core::ResourceUsage;

/// Numbers of a kernel's metadata (LLVM, "User Guide for AMDGPU Backend", Code Object V5 Metadata).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Vector registers a lane, accumulation registers among them.
    pub vgprs: u64,
    /// Accumulation registers.
    pub agprs: u64,
    /// Scalar registers.
    pub sgprs: u64,
    /// Vector registers that went to memory.
    pub vgpr_spills: u64,
    /// Scalar registers that went to lanes of vector registers.
    pub sgpr_spills: u64,
    /// Bytes of LDS.
    pub lds_bytes: u64,
    /// Bytes a lane of private memory.
    pub scratch_bytes: u64,
}

impl Resources {
    /// Reads the metadata note: MessagePack maps, of which only the numbers wanted here are looked at.
    /// `None` where one is missing.
    #[must_use]
    pub fn of(code_object: &[u8]) -> Option<Self> {
        let number = |key: &str| number_after(code_object, key);
        Some(Self {
            vgprs: number(".vgpr_count")?,
            agprs: number(".agpr_count").unwrap_or(0),
            sgprs: number(".sgpr_count")?,
            vgpr_spills: number(".vgpr_spill_count")?,
            sgpr_spills: number(".sgpr_spill_count")?,
            lds_bytes: number(".group_segment_fixed_size")?,
            scratch_bytes: number(".private_segment_fixed_size")?,
        })
    }

    pub(crate) fn usage(self) -> ResourceUsage {
        let word = |x: u64| u32::try_from(x).ok();
        ResourceUsage {
            registers: word(self.vgprs),
            spill_bytes: word(4 * self.vgpr_spills),
            stack_bytes: word(self.scratch_bytes),
            shared_bytes: word(self.lds_bytes),
        }
    }
}

/// The number that follows a key in a MessagePack map.
fn number_after(bytes: &[u8], key: &str) -> Option<u64> {
    let text = key.as_bytes();
    let length = u8::try_from(text.len()).ok()?;
    let key = if length < 32 {
        [&[0xa0 | length][..], text].concat()
    } else {
        [&[0xd9, length][..], text].concat()
    };
    let at = bytes.windows(key.len()).position(|window| window == key)? + key.len();
    let big_endian = |count: usize| {
        let digits = bytes.get(at + 1..at + 1 + count)?;
        Some(digits.iter().fold(0, |number, digit| number << 8 | u64::from(*digit)))
    };
    match *bytes.get(at)? {
        small @ 0..=0x7f => Some(small.into()),
        0xcc => big_endian(1),
        0xcd => big_endian(2),
        0xce => big_endian(4),
        _ => None,
    }
}
