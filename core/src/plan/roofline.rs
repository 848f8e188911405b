//! Upper bounds of a device's speed.

/// Peak rates of a device, if known; `source` says whether they are measured or taken from a data sheet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Roofline {
    /// Floating-point operations a second, in the type a problem computes in.
    pub flops_per_second: Option<f64>,
    /// Bytes a second to and from the device's memory.
    pub bytes_per_second: Option<f64>,
    /// Source of the numbers.
    pub source: String,
}

impl std::fmt::Display for Roofline {
    /// Prints as `989.50 TFLOP/s, 4.80 TB/s (source)`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tera =
            |rate: Option<f64>| rate.map_or("unknown".to_owned(), |rate| format!("{:.2}", rate / 1e12));
        let source = if self.source.is_empty() { "not known" } else { &self.source };
        let (flops, bytes) = (tera(self.flops_per_second), tera(self.bytes_per_second));
        write!(f, "{flops} TFLOP/s, {bytes} TB/s ({source})")
    }
}
