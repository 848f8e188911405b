//! RDNA: matrix instructions in the layouts of AMD's documents, moves between rows, waits and barriers. Inputs of
//! products are small integers, whose sums are exact, so that the order of summation does not matter.

mod common;

use common::{Random, bytes, compile, device, words};
use fmha_emu_cdna::{Arch, CodeObject, FaultKind, Launch, LaunchError};

/// Results of the kernels on a device of that architecture, from operands that lie one behind the other.
fn run(
    arch: Arch,
    code: &[u8],
    kernel: &str,
    operands: &[Vec<u8>],
    threads: u32,
) -> Result<Vec<u32>, LaunchError> {
    let device = device(arch);
    let module = device.load(code).expect("a code object");
    let result_bytes = operands.last().map_or(0, Vec::len);
    let to = device.memory.alloc(result_bytes);
    let from: Vec<u64> = operands.iter().map(|operand| device.memory.alloc_from(operand)).collect();
    let args: Vec<u8> = from.iter().chain([&to]).flat_map(|p| p.to_le_bytes()).collect();
    let launch = Launch { grid: [1; 3], block: [threads, 1, 1], dynamic_lds: 0, args: &args };
    device.launch(&module, kernel, &launch)?;
    Ok(words(&device.memory.read_vec(to, result_bytes).expect("allocated above")))
}

/// Bytes of an element, and the codes of 1 and 2.
fn format(kernel: &str) -> (usize, [u32; 2]) {
    match kernel {
        "f16" => (2, [0x3c00, 0x4000]),
        "bf16" => (2, [0x3f80, 0x4000]),
        "fp8" => (1, [0x38, 0x40]),
        _ => (1, [0x3c, 0x40]),
    }
}

/// An operand as the lanes hold it; `at[row][k]` is the matrix, from -2 to 2.
fn fragments(arch: Arch, kernel: &str, at: &[[i32; 16]; 16]) -> Vec<u8> {
    let (size, [one, two]) = format(kernel);
    let mut out = Vec::new();
    for lane in 0..32 {
        let depths = if arch == Arch::Gfx1100 { 0..16 } else { 8 * (lane / 16)..8 * (lane / 16) + 8 };
        for k in depths {
            let value = at[lane % 16][k];
            let sign = if value < 0 { 1 << (8 * size - 1) } else { 0 };
            let code = [0, one, two][value.unsigned_abs() as usize] | sign;
            out.extend_from_slice(&code.to_le_bytes()[..size]);
        }
    }
    out
}

/// Row and column of element `i` of D in a lane.
fn place(arch: Arch, lane: usize, i: usize) -> (usize, usize) {
    if arch == Arch::Gfx1100 { (2 * i + lane / 16, lane % 16) } else { (8 * (lane / 16) + i, lane % 16) }
}

#[test]
fn matrix_instructions_give_the_product_in_amds_layout() {
    let mut random = Random(7);
    for (arch, kernels) in
        [(Arch::Gfx1100, &["f16", "bf16"][..]), (Arch::Gfx1201, &["f16", "bf16", "fp8", "bf8"][..])]
    {
        let Some(code) = compile("wmma.hip", arch) else { return };
        for kernel in kernels {
            let mut matrix =
                || -> [[i32; 16]; 16] { [(); 16].map(|()| [(); 16].map(|()| random.bits() as i32 % 3)) };
            let (a, b, c) = (matrix(), matrix(), matrix());
            let sums: Vec<u32> = (0..32)
                .flat_map(|lane| (0..8).map(move |i| place(arch, lane, i)))
                .map(|(row, column)| (c[row][column] as f32).to_bits())
                .collect();
            let operands = [fragments(arch, kernel, &a), fragments(arch, kernel, &b), bytes(&sums)];
            let got =
                run(arch, &code, kernel, &operands, 32).unwrap_or_else(|e| panic!("{arch} {kernel}: {e}"));
            for (at, bits) in got.iter().enumerate() {
                let (row, column) = place(arch, at / 8, at % 8);
                let want = (0..16).map(|k| a[row][k] * b[column][k]).sum::<i32>() + c[row][column];
                assert_eq!(f32::from_bits(*bits), want as f32, "{arch} {kernel}: row {row}, column {column}");
            }
        }
    }
}

#[test]
fn operands_that_lanes_16_to_31_do_not_repeat_are_a_fault_on_gfx11() {
    let Some(code) = compile("wmma.hip", Arch::Gfx1100) else { return };
    let zeros = || vec![0u8; 1024];
    let mut b = zeros();
    b[20 * 32 + 4] = 1;
    match run(Arch::Gfx1100, &code, "f16", &[zeros(), b, zeros()], 32) {
        Err(LaunchError::Fault(fault)) => {
            assert!(fault.detail.contains("lane 20 does not repeat lane 4"), "{fault}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn products_of_64_bits_take_a_literal_without_its_sign() {
    for arch in Arch::RDNA {
        let Some(code) = compile("wmma.hip", arch) else { return };
        let input: Vec<u32> = (0..32).map(|i| 0x9e37_79b9u32.wrapping_mul(i + 1)).collect();
        let got =
            run(arch, &code, "products", &[bytes(&input)], 32).unwrap_or_else(|e| panic!("{arch}: {e}"));
        let product = |x: u32| 0xd251_1f53u64 * u64::from(x);
        let of = |x: u32| (product(input[0]) >> 32 ^ product(input[0]) ^ product(x) >> 32) as u32;
        assert_eq!(got, input.iter().map(|x| of(*x)).collect::<Vec<u32>>(), "{arch}");
    }
}

#[test]
fn bytes_and_halves_that_all_lanes_read_keep_their_signs() {
    for arch in Arch::RDNA {
        let Some(code) = compile("wmma.hip", arch) else { return };
        let all = CodeObject::parse(&code).expect("a code object").disassemble();
        for name in ["s_load_i8", "s_load_u8", "s_load_i16", "s_load_u16"] {
            let is_there = all.iter().any(|inst| inst.mnemonic == name);
            assert_eq!(is_there, arch == Arch::Gfx1201, "{arch}: {name} is gfx12's");
        }
        let mut input: Vec<u32> = (0..32).map(|i| 0x9180_8182 + 0x0102_0304 * i).collect();
        input[31] = 0;
        let got = run(arch, &code, "parts", &[bytes(&input)], 32).unwrap_or_else(|e| panic!("{arch}: {e}"));
        let (byte, half) = ((input[0] >> 24) as u8, (input[1] >> 16) as u16);
        let parts = [
            i32::from(byte.cast_signed()).cast_unsigned(),
            input[1] >> 24,
            i32::from(half.cast_signed()).cast_unsigned(),
            input[2] >> 16,
        ];
        assert_eq!(got, [&parts, &input[4..]].concat(), "{arch}");
    }
}

#[test]
fn rows_change_places() {
    for arch in Arch::RDNA {
        let Some(code) = compile("wmma.hip", arch) else { return };
        let input: Vec<u32> = (100..132).collect();
        let got = run(arch, &code, "across", &[bytes(&input)], 32).unwrap_or_else(|e| panic!("{arch}: {e}"));
        let want: Vec<u32> = (0..32).map(|l| input[(l & 16 ^ 16) | (15 - l % 16)]).collect();
        assert_eq!(got, want, "{arch}");
    }
}

#[test]
fn every_wait_and_barrier_that_is_removed_is_caught() {
    const S_NOP: u32 = 0xbf80_0000;
    for arch in Arch::RDNA {
        let Some(code) = compile("wmma.hip", arch) else { return };
        let input = bytes(&(0..64).collect::<Vec<u32>>());
        let of = |code: &[u8]| run(arch, code, "exchange", std::slice::from_ref(&input), 64);
        assert_eq!(of(&code).expect("it is right"), (0..64).map(|i| 63 - i).collect::<Vec<u32>>(), "{arch}");
        let object = CodeObject::parse(&code).expect("a code object");
        let entry = object.kernel("exchange").expect("it is there").entry;
        let whole = object.disassemble();
        let body = whole.iter().skip_while(|inst| inst.pc < entry);
        let body = body.take_while(|inst| inst.mnemonic != "s_endpgm");
        let mut caught = 0;
        for inst in body {
            let waits = ["s_waitcnt", "s_barrier", "s_wait_loadcnt", "s_wait_dscnt", "s_wait_kmcnt"];
            // Stores are not read before the kernel ends; a counter that has a register is another's.
            if !waits.iter().any(|name| inst.mnemonic.starts_with(name)) || inst.mnemonic.contains("vscnt") {
                continue;
            }
            let mut mutant = code.clone();
            mutant[inst.file_offset..inst.file_offset + 4].copy_from_slice(&S_NOP.to_le_bytes());
            match of(&mutant) {
                Err(LaunchError::Fault(fault)) => {
                    let kinds = [
                        FaultKind::MissingWait,
                        FaultKind::LdsRace,
                        FaultKind::UninitLds,
                        FaultKind::DivergentBarrier,
                    ];
                    assert!(kinds.contains(&fault.kind), "{arch} 0x{:x}: {fault}", inst.pc);
                    caught += 1;
                }
                other => println!("{arch}: {} at 0x{:x} removed: {other:?}", inst.mnemonic, inst.pc),
            }
        }
        assert!(caught >= 4, "{arch}: {caught} caught");
    }
}
