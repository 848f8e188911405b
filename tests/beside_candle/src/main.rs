//! Program that names both this library and candle. It is compiled, not run, by `backend-cuda/tests/beside_candle.rs`.

fn main() {
    println!("{:?}", cudarc::driver::CudaContext::device_count());
    let Ok(choice) = "auto".parse::<fmha::Backend>() else { return };
    println!("{:?}", choice.open().map(|device| device.name().to_owned()));
}
