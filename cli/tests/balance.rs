//! `fmha bench --emulate` for decoding over sequences of different lengths: number of work items, their
//! bytes, and their balance. Counted in emulators, with workgroups that go to the units in rotation.

use super::{Ran, amd, command, nvidia_check};

/// Random lengths with uniform logarithms, from a seed.
fn drawn(seed: u64, batch: usize, longest: f64) -> Vec<u32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..batch).map(|_| (longest.ln() * next()).exp() as u32).collect()
}

const HEAD_DIM: u64 = 64;

struct Batch {
    heads: (u32, u64),
    tokens: u32,
    lengths: Vec<u32>,
}

impl Batch {
    fn keys(&self) -> u64 {
        self.lengths.iter().map(|&length| u64::from(length)).sum()
    }

    /// K and V, each element once.
    fn bytes(&self) -> u64 {
        self.keys() * self.heads.1 * HEAD_DIM * 2 * 2
    }

    /// Bytes that `items` items read in addition: Q for each of their parts, and lengths, a KiB.
    fn bytes_beside(&self, items: u64) -> u64 {
        let rows = u64::from(self.heads.0 * self.tokens) / self.heads.1;
        (items + self.lengths.len() as u64 * self.heads.1) * (rows * HEAD_DIM * 2 + 1024)
    }

    fn row(&self) -> String {
        let Self { heads, tokens, lengths } = self;
        let longest = lengths.iter().max().unwrap();
        let used: Vec<String> = lengths.iter().map(u32::to_string).collect();
        let (batch, used) = (lengths.len(), used.join(","));
        let (heads, heads_kv) = heads;
        format!(
            "{{ b = {batch}, s = {tokens}, h = {heads}, h_k = {heads_kv}, s_k = {longest}, seqused-k = \"{used}\" }}"
        )
    }
}

/// Sequences until all heads together have this many keys.
fn batches(seed: u64, keys_of_heads: u64) -> Vec<Batch> {
    let shapes = [((28, 4), 1), ((24, 3), 3)];
    let batch_of = |(at, (heads, tokens)): (usize, ((u32, u64), u32))| {
        let mut lengths = drawn(seed + at as u64, 400, 3000.0);
        let mut keys = 0;
        let enough = lengths.iter().position(|&length| {
            keys += u64::from(length);
            keys * heads.1 >= keys_of_heads
        });
        lengths.truncate(enough.unwrap() + 1);
        Batch { heads, tokens, lengths }
    };
    shapes.into_iter().enumerate().map(batch_of).collect()
}

/// Each key is read once a KV head, and no unit has 10 % more than the mean, where each has four work items.
fn is_balanced(arch: &str, units: Option<u32>, batches: &[Batch]) {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<String> = batches.iter().map(Batch::row).collect();
    let table = format!(
        "[[table]]\nname = \"t\"\ntitle = \"unlike lengths\"\nunit = \"gbs\"\n\
         common = {{ d = {HEAD_DIM}, prec = \"bf16\", mask = \"b\" }}\nrows = [{}]\n",
        rows.join(", ")
    );
    std::fs::write(folder.path().join("t.toml"), table).unwrap();
    let mut command = command(folder.path(), &format!("bench t.toml --emulate {arch} -v none --format json"));
    if let Some(units) = units {
        command.env("FMHA_EMULATE_SMS", units.to_string());
    }
    let ran = Ran::of(command.output().unwrap());
    assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    let rows = report["tables"][0]["rows"].as_array().unwrap();
    assert_eq!(rows.len(), batches.len());
    for (row, batch) in rows.iter().zip(batches) {
        let counted = &row["counted"];
        let number =
            |name: &str| counted[name].as_u64().unwrap_or_else(|| panic!("{arch}: no {name}: {row}"));
        let (items, units, bytes) = (number("work_items"), number("units"), number("bytes_of_items"));
        assert!(items >= 4 * units, "{arch}: {items} items on {units} units say nothing: {row}");
        let by_cache = bytes as f64 / batch.bytes() as f64;
        let once = batch.bytes()..=batch.bytes() + batch.bytes_beside(items);
        assert!(once.contains(&bytes), "{arch}: {by_cache} of the keys' and values' bytes: {row}");
        let busiest = counted["busiest_unit_by_mean"].as_f64().unwrap();
        assert!(busiest <= 1.1, "{arch}: the busiest of {units} units has {busiest} of the mean: {row}");
        println!("{arch}: {items} items on {units} units, {by_cache:.3} of the bytes, busiest {busiest:.3}");
    }
}

#[test]
fn cdna_reads_each_key_once_a_kv_head_and_no_unit_has_much_more_than_the_mean() {
    if amd::is_emulated_here() {
        is_balanced("gfx90a", None, &batches(59, 110 * 128 * 11 / 2));
    }
}

#[test]
fn sm_80_reads_each_key_once_a_kv_head_and_no_multiprocessor_has_much_more_than_the_mean() {
    if nvidia_check::is_emulated_here() {
        is_balanced("sm_80", Some(4), &batches(80, 12000));
    }
}
