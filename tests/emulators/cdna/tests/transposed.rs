//! LDS reads that transpose, against the matrix that they transpose.

mod common;

use common::{Random, bytes, compile, device, words};
use fmha_emu_cdna::{Arch, Launch};

const COLUMNS: usize = 16;

/// Runs a kernel of `threads` threads on two words each; as many come back.
fn run(kernel: &str, input: &[u32]) -> Option<Result<Vec<u32>, String>> {
    let code = compile("transposed.hip", Arch::Gfx950)?;
    let device = device(Arch::Gfx950);
    let module = device.load(&code).expect("a code object");
    let size = 4 * input.len();
    let (from, to) = (device.memory.alloc_from(&bytes(input)), device.memory.alloc(size));
    let args: Vec<u8> = [from, to].iter().flat_map(|p| p.to_le_bytes()).collect();
    let launch = Launch { grid: [1; 3], block: [input.len() as u32 / 2, 1, 1], dynamic_lds: 0, args: &args };
    Some(match device.launch(&module, kernel, &launch) {
        Ok(_) => Ok(words(&device.memory.read_vec(to, size).expect("allocated above"))),
        Err(error) => Err(error.to_string()),
    })
}

/// The matrix has rows of 16 elements; each 16 lanes take as many rows as a lane gets elements, and lane `l` of them
/// gets column `l`.
#[test]
fn each_lane_gets_a_column_of_its_sixteen_lanes_rows() {
    for (kernel, elem_bytes) in [("bytes_transposed", 1), ("halves_transposed", 2)] {
        let mut random = Random(7);
        let input: Vec<u32> = (0..128).map(|_| random.bits()).collect();
        let Some(got) = run(kernel, &input) else { return };
        let got = bytes(&got.unwrap_or_else(|error| panic!("{kernel}: {error}")));
        let matrix = bytes(&input);
        let rows = 8 / elem_bytes;
        for lane in 0..64 {
            for n in 0..rows {
                let elem = ((lane / 16 * rows + n) * COLUMNS + lane % 16) * elem_bytes;
                let at = lane * 8 + n * elem_bytes;
                let place = format!("{kernel}: element {n} of lane {lane}");
                assert_eq!(got[at..at + elem_bytes], matrix[elem..elem + elem_bytes], "{place}");
            }
        }
    }
}

#[test]
fn a_transposing_read_of_another_waves_bytes_without_a_barrier_is_a_race() {
    let input: Vec<u32> = (0..256).collect();
    let Some(result) = run("transposed_too_early", &input) else { return };
    let error = result.expect_err("the other wave's bytes, unsynchronised");
    assert!(error.contains("LdsRace") || error.contains("UninitLds"), "{error}");
}
