//! Ways to compute one call, each with its modelled time. Tables and cost models choose by one rule.

/// One way to compute a call, with its modelled time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate<T> {
    /// The way to compute, such as a tile.
    pub choice: T,
    /// Modelled microseconds of the candidate. They only rank the candidates of one list; nothing was measured.
    pub micros: f64,
}

/// The ways to compute a call, with modelled times; the first is the table's choice.
///
/// ```
/// use fmha_core::tune::Candidates;
///
/// let orders = Candidates::of([("dynamic", 38.2), ("static", 36.1)]);
/// assert_eq!(orders.cheapest(0.02).map(|best| best.choice), Some("static"));
/// assert_eq!(orders.cheapest(0.10).map(|best| best.choice), Some("dynamic"));
/// assert_eq!(orders.words(|order| order.to_string()), "dynamic 38.2 us, static 36.1 us, modelled");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Candidates<T>(Vec<Candidate<T>>);

impl<T> Default for Candidates<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Candidates<T> {
    /// Makes a list of choices with their microseconds, the table's choice first.
    pub fn of(priced: impl IntoIterator<Item = (T, f64)>) -> Self {
        Self(priced.into_iter().map(|(choice, micros)| Candidate { choice, micros }).collect())
    }

    /// The fastest candidate by the model. The first candidate is kept unless the model rates it slower than the
    /// fastest by more than the share `least_gain`, which is the model's own error. `None` for an empty list.
    #[must_use]
    pub fn cheapest(&self, least_gain: f64) -> Option<&Candidate<T>> {
        let first = self.0.first()?;
        let fastest = self.0.iter().min_by(|a, b| a.micros.total_cmp(&b.micros))?;
        Some(if fastest.micros * (1.0 + least_gain) < first.micros { fastest } else { first })
    }

    /// Whether there are no candidates.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All candidates, the table's first.
    pub fn iter(&self) -> impl Iterator<Item = &Candidate<T>> {
        self.0.iter()
    }

    /// Text for a plan: each candidate with its microseconds to three digits.
    #[must_use]
    pub fn words(&self, name: impl Fn(&T) -> String) -> String {
        let micros = |micros: f64| {
            let digits = if micros < 100.0 { 1 } else { 0 };
            format!("{micros:.digits$} us")
        };
        let each: Vec<_> =
            self.0.iter().map(|one| format!("{} {}", name(&one.choice), micros(one.micros))).collect();
        format!("{}, modelled", each.join(", "))
    }
}
