//! The battery.
