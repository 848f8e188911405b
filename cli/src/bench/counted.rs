//! What an emulated device counted of a call. None of it is a speed.

use serde_json::{Map, Value};

/// A counter's name in the emulator's words, and its column.
const COLUMNS: [(&str, &str); 14] = [
    ("wave_instructions", "wave instructions"),
    ("warp_instructions", "warp instructions"),
    ("matrix_instructions", "of the matrix unit"),
    ("matrix_passes", "its passes of 4 cycles"),
    ("tensor_macs", "tensor multiply-adds"),
    ("lds_accesses", "LDS instructions"),
    ("lds_cycles", "LDS cycles"),
    ("shared_passes", "shared memory passes"),
    ("bank_conflicts", "by bank conflicts"),
    ("memory_accesses", "memory instructions"),
    ("line_bytes", "bytes of lines touched"),
    ("bulk_bytes", "bytes by bulk copies"),
    ("global_read", "bytes read"),
    ("global_written", "bytes written"),
];

/// Counters of the launches of one call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counted {
    /// As the emulator gives them, one a launch.
    launches: Vec<Value>,
    /// Seconds of the call's operations and bytes at the rates that the device's maker states, if the kernel is no fallback.
    pub(super) modelled_seconds: Option<f64>,
}

impl Counted {
    /// `text` is what the emulator said of the launches, if it counts any.
    pub(super) fn new(text: Option<&str>, modelled_seconds: Option<f64>) -> Self {
        let launches = text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        Self { launches, modelled_seconds }
    }

    fn sum(&self, counter: &str) -> Option<u64> {
        self.launches.iter().filter_map(|launch| launch["counters"][counter].as_u64()).reduce(|a, b| a + b)
    }

    /// For a machine: the counters' sums, by the emulator's names.
    pub(super) fn json(&self) -> Value {
        let sums = COLUMNS.iter().filter_map(|(name, _)| Some(((*name).to_owned(), self.sum(name)?.into())));
        let mut object: Map<String, Value> = sums.collect();
        object.insert("launches".to_owned(), self.launches.len().into());
        object.into()
    }
}

/// Rows of cells, the first of them titles: of each counter that some row has.
pub(super) fn table(rows: &[(&str, &Counted)]) -> Vec<Vec<String>> {
    let has = |name: &str| rows.iter().any(|(_, counted)| counted.sum(name).is_some());
    let columns: Vec<_> = COLUMNS.iter().filter(|(name, _)| has(name)).collect();
    let mut head = vec!["row".to_owned(), "launches".to_owned()];
    head.extend(columns.iter().map(|(_, title)| (*title).to_owned()));
    head.push("modelled at the roofline".to_owned());
    let cells = rows.iter().map(|(label, counted)| {
        let mut cells = vec![(*label).to_owned(), counted.launches.len().to_string()];
        let number = |name: &str| counted.sum(name).map_or("-".to_owned(), |sum| sum.to_string());
        cells.extend(columns.iter().map(|(name, _)| number(name)));
        cells.push(counted.modelled_seconds.map_or("-".to_owned(), crate::timing::duration));
        cells
    });
    std::iter::once(head).chain(cells).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calls_launches_are_summed_and_a_counter_that_nothing_has_is_no_column() {
        let text =
            r#"[{"counters": {"matrix_passes": 3, "lds_cycles": 5}}, {"counters": {"matrix_passes": 4}}]"#;
        let counted = Counted::new(Some(text), Some(2e-3));
        let none = Counted::new(None, None);
        let expected = [
            ["row", "launches", "its passes of 4 cycles", "LDS cycles", "modelled at the roofline"],
            ["a", "2", "7", "5", "2.000 ms"],
            ["b", "0", "-", "-", "-"],
        ];
        assert_eq!(table(&[("a", &counted), ("b", &none)]), expected);
        let json = serde_json::json!({ "launches": 2, "matrix_passes": 7, "lds_cycles": 5 });
        assert_eq!(counted.json(), json);
    }
}
