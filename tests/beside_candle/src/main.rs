//! One program that names both; it is checked, not run: `backend-cuda/tests/beside_candle.rs`.

fn main() {
    println!("{:?}", cudarc::driver::CudaContext::device_count());
    let Ok(choice) = "auto".parse::<fmha::Backend>() else { return };
    println!("{:?}", choice.open().map(|device| device.name().to_owned()));
}
