//! What the tests of this crate share.
#![allow(dead_code)]

use std::process::Command;

/// Whether a clang that knows AMDGPU is there; says so where it is not.
pub(crate) fn clang_is_there() -> bool {
    let named = std::env::var("FMHA_HIP_CLANG").ok();
    let there = named.iter().map(String::as_str).chain(["clang-22", "clang"]).any(|clang| {
        Command::new(clang)
            .arg("--print-targets")
            .output()
            .is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("amdgcn"))
    });
    if !there {
        println!("absent: no clang with target amdgcn, nothing was compiled");
    }
    there
}

/// What a code object says of its one kernel (LLVM AMDGPU usage, "Code Object V5 Metadata").
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    pub(crate) vgprs: u64,
    pub(crate) agprs: u64,
    pub(crate) sgprs: u64,
    pub(crate) vgpr_spills: u64,
    pub(crate) sgpr_spills: u64,
    pub(crate) lds_bytes: u64,
    pub(crate) scratch_bytes: u64,
}

/// Reads the metadata note: MessagePack maps, of which only the numbers wanted here are looked at.
pub(crate) fn resources(code: &[u8]) -> Resources {
    let number = |key: &str| {
        let key = [&[0xa0 | key.len() as u8][..], key.as_bytes()].concat();
        let long_key = [&[0xd9, (key.len() - 1) as u8][..], &key[1..]].concat();
        let after =
            |key: &[u8]| code.windows(key.len()).position(|window| window == key).map(|at| at + key.len());
        let at = if key.len() <= 32 { after(&key) } else { after(&long_key) };
        let at = at.unwrap_or_else(|| panic!("no {} in the notes", String::from_utf8_lossy(&key[1..])));
        match code[at] {
            small @ 0..=0x7f => u64::from(small),
            0xcc => u64::from(code[at + 1]),
            0xcd => u64::from(u16::from_be_bytes([code[at + 1], code[at + 2]])),
            0xce => u64::from(u32::from_be_bytes([code[at + 1], code[at + 2], code[at + 3], code[at + 4]])),
            other => panic!("{other:#x} is no number of MessagePack"),
        }
    };
    Resources {
        vgprs: number(".vgpr_count"),
        agprs: number(".agpr_count"),
        sgprs: number(".sgpr_count"),
        vgpr_spills: number(".vgpr_spill_count"),
        sgpr_spills: number(".sgpr_spill_count"),
        lds_bytes: number(".group_segment_fixed_size"),
        scratch_bytes: number(".private_segment_fixed_size"),
    }
}
