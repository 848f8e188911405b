//! Fused multi-head attention.
