//! A recorded launch is the launch.

mod common;

use common::{bytes, compile, device};
use fmha_emu_cdna::{Arch, Launch, LaunchError, Recording};

#[test]
fn a_recorded_launch_read_back_does_what_the_launch_did() {
    let arch = Arch::Gfx942;
    let Some(code) = compile("ops.hip", arch) else { return };
    let device = device(arch);
    let module = device.load(&code).expect("a code object");
    let input: Vec<u32> = (0..192).map(|i| (i as f32 * 0.37 + 1.0).to_bits()).collect();
    let (from, to) = (device.memory.alloc_from(&bytes(&input)), device.memory.alloc(256));
    let args: Vec<u8> = [from, to].iter().flat_map(|p| p.to_le_bytes()).collect();
    let launch = Launch { grid: [1; 3], block: [64, 1, 1], dynamic_lds: 0, args: &args };
    let recording = Recording::new(&device, &module, "quotients", &launch);
    let counters = device.launch(&module, "quotients", &launch).expect("a sound kernel");
    let out = device.memory.read_vec(to, 256).expect("allocated above");

    let read = Recording::from_bytes(&recording.to_bytes()).expect("just written");
    assert_eq!(read, recording);
    let ended = read.run_as(&read.code, device.options).expect("a sound kernel");
    assert_eq!(ended.memory, [bytes(&input), out]);
    assert_eq!(ended.counters, counters);

    let Err(LaunchError::Refused(text)) = Recording::from_bytes(b"no recording") else {
        panic!("it was read")
    };
    assert!(text.contains("recorded launch"), "{text}");
}
