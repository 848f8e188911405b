//! Counters of a call on an emulated device. They are counts, never speeds.

use serde_json::{Map, Value};

/// Names of the emulator's counters, each with its column.
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
    /// Reports of the emulator, one for each launch.
    launches: Vec<Value>,
    /// Seconds of the call's operations and bytes at the rates that the device's maker states, if the kernel
    /// is no fallback.
    pub(super) modelled_seconds: Option<f64>,
}

impl Counted {
    /// `text` is the emulator's report on the launches, if it counts any.
    pub(super) fn new(text: Option<&str>, modelled_seconds: Option<f64>) -> Self {
        let launches = text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        Self { launches, modelled_seconds }
    }

    fn sum(&self, counter: &str) -> Option<u64> {
        self.launches.iter().filter_map(|launch| launch["counters"][counter].as_u64()).reduce(|a, b| a + b)
    }

    /// The work items of the launch that reads most.
    fn items(&self) -> Option<Items> {
        self.launches.iter().filter_map(Items::of).max_by_key(|items| items.bytes)
    }

    /// Sums of the counters for a machine, under the emulator's names.
    pub(super) fn json(&self) -> Value {
        let sums = COLUMNS.iter().filter_map(|(name, _)| Some(((*name).to_owned(), self.sum(name)?.into())));
        let mut object: Map<String, Value> = sums.collect();
        object.insert("launches".to_owned(), self.launches.len().into());
        if let Some(items) = self.items() {
            let Items { number, bytes, .. } = items;
            object.insert("work_items".to_owned(), number.into());
            object.insert("bytes_of_items".to_owned(), bytes.into());
            object.insert("units".to_owned(), items.units.into());
            object.insert("busiest_unit_by_mean".to_owned(), items.busiest_by_mean.into());
        }
        object.into()
    }
}

/// Workgroups of a launch that had work.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Items {
    /// Number of workgroups that read at least a quarter of the bytes of the busiest one. All others have only
    /// looked at lengths and found no work.
    number: usize,
    /// Bytes that all workgroups have read; on AMD's devices, bytes that a workgroup reads again count once.
    bytes: u64,
    /// Multiprocessors, or compute units.
    units: usize,
    /// Bytes of the busiest unit by the mean of all units, if workgroups go to the units in rotation.
    busiest_by_mean: f64,
}

impl Items {
    /// Work items of a launch, from the emulator's report; `None` if nothing was read.
    fn of(launch: &Value) -> Option<Self> {
        let units = usize::try_from(launch["units"].as_u64()?).ok().filter(|&units| units > 0)?;
        let groups: Vec<u64> =
            launch["bytes_of_groups"].as_array()?.iter().filter_map(Value::as_u64).collect();
        let bytes: u64 = groups.iter().sum();
        let of_unit = |unit: usize| groups.iter().skip(unit).step_by(units).sum::<u64>();
        let busiest = (0..units).map(of_unit).max()?;
        let fullest = groups.iter().copied().max()?;
        let number = groups.iter().filter(|&&bytes| bytes > 0 && 4 * bytes >= fullest).count();
        let busiest_by_mean = busiest as f64 * units as f64 / bytes as f64;
        (bytes > 0).then_some(Self { number, bytes, units, busiest_by_mean })
    }
}

/// Rows of cells, the first with titles, for each counter that some row has.
pub(super) fn table(rows: &[(&str, &Counted)]) -> Vec<Vec<String>> {
    let has = |name: &str| rows.iter().any(|(_, counted)| counted.sum(name).is_some());
    let columns: Vec<_> = COLUMNS.iter().filter(|(name, _)| has(name)).collect();
    let mut head = vec!["row".to_owned(), "launches".to_owned()];
    head.extend(columns.iter().map(|(_, title)| (*title).to_owned()));
    let has_items = rows.iter().any(|(_, counted)| counted.items().is_some());
    if has_items {
        let titles = ["work items", "bytes that they read", "busiest unit by the mean"];
        head.extend(titles.map(str::to_owned));
    }
    head.push("modelled at the roofline".to_owned());
    let cells = rows.iter().map(|(label, counted)| {
        let mut cells = vec![(*label).to_owned(), counted.launches.len().to_string()];
        let number = |name: &str| counted.sum(name).map_or("-".to_owned(), |sum| sum.to_string());
        cells.extend(columns.iter().map(|(name, _)| number(name)));
        if has_items {
            cells.extend(counted.items().map_or(["-", "-", "-"].map(str::to_owned), |items| {
                [
                    items.number.to_string(),
                    items.bytes.to_string(),
                    format!("{:.3} of {}", items.busiest_by_mean, items.units),
                ]
            }));
        }
        cells.push(counted.modelled_seconds.map_or("-".to_owned(), crate::timing::duration));
        cells
    });
    std::iter::once(head).chain(cells).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workgroups_are_dealt_to_units_in_turn() {
        let launch = serde_json::json!({ "units": 2, "bytes_of_groups": [10, 20, 30, 1, 0] });
        let found = Items::of(&launch);
        assert_eq!(found, Some(Items { number: 3, bytes: 61, units: 2, busiest_by_mean: 80.0 / 61.0 }));
        assert_eq!(Items::of(&serde_json::json!({ "units": 2, "bytes_of_groups": [0] })), None);
        let text = format!(r#"[{{"units": 1, "bytes_of_groups": [7]}}, {launch}]"#);
        let rows = table(&[("a", &Counted::new(Some(&text), None))]);
        assert_eq!(rows[1][2..5], ["3", "61", "1.311 of 2"]);
    }

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
