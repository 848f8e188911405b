//! Messages to a user without an AMD GPU, from the real library if it is installed.

use fmha_core::Error;

#[test]
fn without_a_device_the_driver_has_its_say_and_without_a_driver_every_name_tried_is_listed() {
    let text = match fmha_rocm::open(0, None) {
        Err(Error::NoDevice(text)) => text,
        Err(other) => panic!("{other}"),
        Ok(backend) => {
            println!("absent: a machine without a device: this one has {}", backend.name());
            return;
        }
    };
    if text.contains("no HIP library could be opened") {
        println!("absent: libamdhip64: only the list of names that were tried was checked");
        for name in ["libamdhip64.so (", "libamdhip64.so.7 (", "libamdhip64.so.6 (", "libamdhip64.so.5 ("] {
            assert!(text.contains(name), "{name} is not among those tried: {text}");
        }
        assert!(text.contains("/opt/rocm/lib/libamdhip64.so"), "{text}");
    } else {
        // HIP documents hipErrorNoDevice as 100; a runtime that finds no driver at all returns 101 or 3.
        assert!(text.contains("hipInit") || text.contains("hipGetDeviceCount"), "no call is named: {text}");
        assert!(text.chars().any(|c| c.is_ascii_digit()), "no code: {text}");
        println!("the driver says: {text}");
    }
}
