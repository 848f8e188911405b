//! One battery of attention tests for every backend.
pub mod check;
pub mod execute;
pub mod init;
pub mod memory;
pub mod tensor;
pub mod tensors;
pub mod tolerance;
pub mod verdict;
