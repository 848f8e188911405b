//! Resources of a kernel, read from its code object.

use fmha_core::ResourceUsage;

/// Numbers of a kernel's metadata (LLVM, "User Guide for AMDGPU Backend", Code Object V5 Metadata).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Vector registers per lane, accumulation registers included.
    pub vgprs: u64,
    /// Number of accumulation registers of the kernel.
    pub agprs: u64,
    /// Number of scalar registers of the kernel.
    pub sgprs: u64,
    /// Vector registers that were spilled to memory.
    pub vgpr_spills: u64,
    /// Scalar registers that were spilled to lanes of vector registers.
    pub sgpr_spills: u64,
    /// Bytes of LDS that the kernel uses.
    pub lds_bytes: u64,
    /// Bytes of private memory of each lane.
    pub scratch_bytes: u64,
}

impl Resources {
    /// Reads the metadata note: MessagePack maps, searched only for the numbers of this struct. `None` if one is
    /// missing.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes a MessagePack string: its length is in the low bits of the head, or from 32 bytes on in a byte of
    /// its own.
    fn text(key: &str) -> Vec<u8> {
        let head = if key.len() < 32 { vec![0xa0 + key.len() as u8] } else { vec![0xd9, key.len() as u8] };
        [&head, key.as_bytes()].concat()
    }

    /// Makes a fake object with these pairs, and unrelated bytes before and after them.
    fn object(pairs: &[(&str, &[u8])]) -> Vec<u8> {
        let mut bytes = b"\x7fELF of no size".to_vec();
        for (key, number) in pairs {
            bytes.extend(text(key));
            bytes.extend_from_slice(number);
        }
        bytes.extend([0x11; 8]);
        bytes
    }

    #[test]
    fn a_number_is_read_in_each_of_its_four_forms() {
        for (form, number) in [
            (&[0][..], Some(0)),
            (&[0x7f], Some(127)),
            (&[0xcc, 0xff], Some(255)),
            (&[0xcd, 0x12, 0x34], Some(0x1234)),
            (&[0xce, 0x12, 0x34, 0x56, 0x78], Some(0x1234_5678)),
            // None of these is a count: a negative number, an empty text, a number of eight bytes.
            (&[0xff], None),
            (&[0xa0], None),
            (&[0xcf, 0, 0, 0, 0, 0, 0, 0, 1], None),
        ] {
            assert_eq!(
                number_after(&object(&[("other", &[9]), (".key", form)]), ".key"),
                number,
                "{form:x?}"
            );
        }
    }

    #[test]
    fn a_key_is_found_by_its_length_too_and_a_number_cut_short_is_none() {
        for length in [1, 31, 32, 33, 255] {
            let key = "k".repeat(length);
            assert_eq!(number_after(&object(&[(&key, &[42])]), &key), Some(42), "{length}");
        }
        let longer = object(&[(".vgpr_count_of_another", &[1])]);
        assert_eq!(number_after(&longer, ".vgpr_count"), None);
        assert_eq!(number_after(&[text(".key"), vec![0xcd, 1]].concat(), ".key"), None);
        assert_eq!(number_after(&text(".key"), ".key"), None);
    }

    const PAIRS: [(&str, &[u8]); 7] = [
        (".agpr_count", &[4]),
        (".group_segment_fixed_size", &[0xce, 0, 1, 0x40, 0]),
        (".private_segment_fixed_size", &[24]),
        (".sgpr_count", &[0x60]),
        (".sgpr_spill_count", &[3]),
        (".vgpr_count", &[0xcc, 0x80]),
        (".vgpr_spill_count", &[5]),
    ];

    #[test]
    fn each_number_of_a_kernel_is_that_of_its_key() {
        let all = Resources {
            vgprs: 128,
            agprs: 4,
            sgprs: 96,
            vgpr_spills: 5,
            sgpr_spills: 3,
            lds_bytes: 0x14000,
            scratch_bytes: 24,
        };
        assert_eq!(Resources::of(&object(&PAIRS)), Some(all));
        for (absent, (key, _)) in PAIRS.iter().enumerate() {
            let mut pairs = PAIRS.to_vec();
            pairs.remove(absent);
            // An architecture may have no accumulation registers.
            let left = (*key == ".agpr_count").then_some(Resources { agprs: 0, ..all });
            assert_eq!(Resources::of(&object(&pairs)), left, "without {key}");
        }
    }

    #[test]
    fn a_spilled_register_is_four_bytes_and_what_no_word_holds_is_not_known() {
        let numbers = Resources {
            vgprs: 128,
            vgpr_spills: 5,
            lds_bytes: 512,
            scratch_bytes: 24,
            ..Resources::default()
        };
        let usage = ResourceUsage {
            registers: Some(128),
            spill_bytes: Some(20),
            stack_bytes: Some(24),
            shared_bytes: Some(512),
        };
        assert_eq!(numbers.usage(), usage);
        let many = Resources { vgpr_spills: 1 << 30, ..numbers };
        assert_eq!(many.usage(), ResourceUsage { spill_bytes: None, ..usage });
    }
}
