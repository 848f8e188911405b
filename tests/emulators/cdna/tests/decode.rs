//! The decoder against LLVM's disassembler, on real code objects.

mod common;

use std::process::Command;

use common::{absent, compile};
use fmha_emu_cdna::{Arch, CodeObject};

/// LLVM's text of each instruction: address, mnemonic, operands.
fn objdump(code: &[u8], tag: &str) -> Option<Vec<(u64, String, Vec<String>)>> {
    let path = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("objdump.{tag}.co"));
    std::fs::write(&path, code).expect("the test's own folder");
    let tool = "llvm-objdump-22";
    let mut command = Command::new(tool);
    if tag.ends_with("gfx1100") {
        // Operands as they were compiled: half registers have no numbers of their own.
        command.arg("--mattr=-real-true16");
    }
    let Ok(output) = command.arg("-d").arg(&path).output() else {
        absent(&format!("{tool} (the decoder was held against nothing)"));
        return None;
    };
    let text = String::from_utf8(output.stdout).expect("ASCII");
    let mut out = Vec::new();
    for line in text.lines().filter(|line| line.starts_with('\t')) {
        let (inst, comment) = line.trim().split_once("//").expect("objdump comments every instruction");
        let pc = u64::from_str_radix(comment.trim().split(':').next().unwrap_or(""), 16).expect("an address");
        let (name, operands) = inst.trim().split_once(' ').unwrap_or((inst.trim(), ""));
        let name = ["_dpp", "_sdwa", "_e32", "_e64"].iter().fold(name, |n, s| n.trim_end_matches(s));
        let operands = operands.split(", ").map(|o| o.split(' ').next().unwrap_or("").to_owned());
        out.push((pc, name.to_owned(), operands.filter(|o| !o.is_empty()).collect()));
    }
    Some(out)
}

#[test]
fn every_instruction_of_the_kernels_reads_as_llvm_reads_it() {
    for arch in Arch::ALL {
        for kernel in [if arch.is_rdna() { "wmma.hip" } else { "attention.hip" }, "axpy.hip", "ops.hip"] {
            let Some(code) = compile(kernel, arch) else { return };
            let Some(theirs) = objdump(&code, &format!("{kernel}.{arch}")) else { return };
            let ours = CodeObject::parse(&code).expect("a code object").disassemble();
            let mut compared = 0;
            for (pc, name, operands) in theirs {
                // Padding between kernels is not reached and not compared.
                if name == "s_code_end" || name == ".long" {
                    continue;
                }
                let inst =
                    ours.iter().find(|i| i.pc == pc).unwrap_or_else(|| panic!("{arch} 0x{pc:x}: {name}"));
                assert_eq!(inst.mnemonic, name, "{arch} {kernel} 0x{pc:x}");
                // Immediates of scalar control have names of their own in LLVM's text.
                let control = [
                    "s_wait",
                    "s_delay_alu",
                    "buffer_gl",
                    "global_inv",
                    "global_wb",
                    "s_clause",
                    "s_sendmsg",
                    "s_set_inst",
                    "s_branch",
                    "s_cbranch",
                    "s_nop",
                    "s_endpgm",
                    "s_barrier",
                    "s_setprio",
                    "s_movk",
                ];
                let immediate = ["s_addk", "s_mulk", "s_cmpk", "s_setreg", "s_getreg", "s_sleep"];
                if control.iter().chain(&immediate).any(|c| name.starts_with(c)) {
                    continue;
                }
                // RDNA's NULL reads as 0; its trap registers are scalars from 108 on.
                let reads_null = |(at, word): (usize, &String)| {
                    let ours = inst.operands.get(at).map(String::as_str);
                    if let Some(trap) = word.strip_prefix("ttmp").and_then(|n| n.parse::<u32>().ok()) {
                        return format!("s{}", 108 + trap);
                    }
                    if word == "null" && ours == Some("0") { "0".to_owned() } else { word.clone() }
                };
                let operands: Vec<String> = operands.iter().enumerate().map(reads_null).collect();
                let count = inst.operands.len();
                assert!(count > 0 || operands.is_empty(), "{arch} {kernel} 0x{pc:x} {name} {operands:?}");
                assert_eq!(
                    inst.operands[..],
                    operands[..count.min(operands.len())],
                    "{arch} {kernel} 0x{pc:x} {name}"
                );
                compared += 1;
            }
            assert!(compared > 10, "{arch} {kernel}: {compared} instructions compared");
        }
    }
}
