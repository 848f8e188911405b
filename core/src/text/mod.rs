//! Device text, and the structs, constants and facts that it shares with the host.

pub mod abi;
pub mod bind;
pub mod bwd_workspace;
pub mod cache_update;
pub mod choose_params;
pub mod code_source;
pub mod fields;
pub mod functions;
pub mod index_loss_params;
pub mod memory;
pub mod quantize_params;
pub mod scale_params;
pub mod small_outputs;
pub mod source;
pub mod spec;
pub mod value_params;
