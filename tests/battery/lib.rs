//! The battery.
pub mod execute;
pub mod init;
pub mod memory;
pub mod tensor;
pub mod tensors;
