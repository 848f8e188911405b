//! The `ptx-emu` command.

fn main() {}
