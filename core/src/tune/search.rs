//! Comparison of two tiles by alternating bursts: which is faster, and whether the difference exceeds the noise.

use super::TileOptions;
use crate::records::{Listed, TUNE, record};

/// Times the tiles of one problem.
pub trait Timer {
    /// A tile that was planned and compiled, and whose results were checked.
    type Ready;

    /// Announces the next tiles to be tried, in order, unless one of them beats the best tile so far. A timer may
    /// compile them ahead.
    fn coming(&mut self, _tiles: Vec<TileOptions>) {}

    /// Makes a tile ready.
    ///
    /// # Errors
    /// Why it cannot be timed: the plan or the compiler refuses incompatible fields.
    fn ready(&mut self, tile: &TileOptions) -> Result<Self::Ready, String>;

    /// Seconds of a call, in a burst of them.
    ///
    /// # Errors
    /// An error of the device.
    fn burst(&mut self, ready: &Self::Ready) -> Result<f64, String>;

    /// Whether the search may begin another tile; called before each one.
    fn goes_on(&self) -> bool {
        true
    }
}

/// One change of a tile: a field's name and its value.
pub type Change = (&'static str, String);

/// Ratio of modelled times to the kernel's own tile above which a change is not tried; it exceeds the model's
/// error.
const HOPELESS_BY_MODEL: f64 = 1.3;

/// Every value of every field as a change of a tile, sorted by modelled time; changes without one follow in the
/// order of the fields. The second result is the number of changes left out as hopeless. `micros` is the model's
/// time of the own tile (`None`) or of a changed one; where it gives none, the time counts as the own tile's.
pub fn by_model(
    knobs: &[(&'static str, Vec<String>)],
    micros: impl Fn(Option<&Change>) -> Option<f64>,
) -> (Vec<Change>, usize) {
    let own = micros(None);
    let mut changes: Vec<(f64, Change)> = Vec::new();
    let mut left_out = 0;
    for (knob, values) in knobs {
        for value in values {
            let change = (*knob, value.clone());
            let price = match (own, micros(Some(&change))) {
                (Some(own), Some(micros)) => micros / own,
                _ => 1.0,
            };
            if price > HOPELESS_BY_MODEL {
                left_out += 1;
            } else {
                changes.push((price, change));
            }
        }
    }
    // The sort is stable, so equal times keep the order of the fields.
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    (changes.into_iter().map(|(_, change)| change).collect(), left_out)
}

/// Compares two tiles, with one burst of each in every round. Every other round runs the second tile first, so that a
/// drifting clock favours neither.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InTurns {
    /// Seconds of a call with the tile to beat.
    pub incumbent: Vec<f64>,
    /// Seconds of calls with the challenging tile.
    pub challenger: Vec<f64>,
}

/// Least gain worth storing a tile for, even if it is certain.
pub const LEAST_GAIN: f64 = 0.005;

/// Gain below which a challenger is given up, if each of its first rounds is that bad.
const HOPELESS: f64 = -0.03;
const GLANCE_ROUNDS: usize = 2;

impl InTurns {
    /// Runs the measurement.
    ///
    /// # Errors
    /// An error of the device.
    pub fn run<T: Timer>(
        timer: &mut T,
        incumbent: &T::Ready,
        challenger: &T::Ready,
        rounds: u32,
    ) -> Result<Self, String> {
        let mut measured = Self::default();
        // A first burst brings caches and clocks into the state of later rounds.
        timer.burst(incumbent)?;
        timer.burst(challenger)?;
        for round in 0..rounds {
            if round % 2 == 0 {
                measured.incumbent.push(timer.burst(incumbent)?);
                measured.challenger.push(timer.burst(challenger)?);
            } else {
                measured.challenger.push(timer.burst(challenger)?);
                measured.incumbent.push(timer.burst(incumbent)?);
            }
            let gains = measured.gains();
            if gains.len() == GLANCE_ROUNDS && gains.iter().all(|&gain| gain < HOPELESS) {
                break;
            }
        }
        Ok(measured)
    }

    /// Gains of the challenger in each round, sorted.
    fn gains(&self) -> Vec<f64> {
        let pairs = self.incumbent.iter().zip(&self.challenger);
        let mut gains: Vec<f64> = pairs.map(|(incumbent, challenger)| incumbent / challenger - 1.0).collect();
        gains.sort_unstable_by(f64::total_cmp);
        gains
    }

    /// The median gain of the rounds: 0.02 if the challenger takes 1/1.02 of the time.
    #[must_use]
    pub fn gain(&self) -> f64 {
        quantile(&self.gains(), 0.5)
    }

    /// Spread of the gains of the rounds: third quartile minus first quartile.
    #[must_use]
    pub fn spread(&self) -> f64 {
        let gains = self.gains();
        quantile(&gains, 0.75) - quantile(&gains, 0.25)
    }

    /// The rule: a gain counts when its median is beyond both [`LEAST_GAIN`] and the spread of the rounds.
    #[must_use]
    pub fn is_gain(&self) -> bool {
        self.gain() > LEAST_GAIN.max(self.spread())
    }

    /// Median seconds of the incumbent and of the challenger.
    #[must_use]
    pub fn medians(&self) -> (f64, f64) {
        let median = |times: &[f64]| {
            let mut times = times.to_vec();
            times.sort_unstable_by(f64::total_cmp);
            quantile(&times, 0.5)
        };
        (median(&self.incumbent), median(&self.challenger))
    }
}

/// Quantile of sorted numbers, with linear interpolation between neighbours; NaN for no numbers.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    let at = part * sorted.len().saturating_sub(1) as f64;
    let (low, high) = (sorted.get(at.floor() as usize), sorted.get(at.ceil() as usize));
    match (low, high) {
        (Some(low), Some(high)) => low + (high - low) * at.fract(),
        _ => f64::NAN,
    }
}

/// A tile that was tried, and its comparison with the best tile before it.
#[derive(Clone, Debug)]
pub struct Tried {
    /// The field that was changed: `block_n=128`.
    pub changed: String,
    /// Rounds of the measurement, or the reason why there are none.
    pub outcome: Result<InTurns, String>,
}

/// Result of a search.
#[derive(Clone, Debug)]
pub struct Found {
    /// The best tile; the kernel's own choice if nothing was faster.
    pub tile: TileOptions,
    /// New measurement of the kernel's own tile against the best one; `None` if they are equal. It is needed
    /// because the best of many noisy times is too optimistic.
    pub confirmed: Option<InTurns>,
    /// Number of changes that were not tried because [`Timer::goes_on`] returned false.
    pub not_begun: usize,
}

impl Found {
    /// Whether the best tile is worth storing.
    #[must_use]
    pub fn is_gain(&self) -> bool {
        self.confirmed.as_ref().is_some_and(InTurns::is_gain)
    }
}

/// Tries each change, one after another, on the best tile so far, with `rounds` rounds each, as long as the timer
/// goes on. Confirms the result with three times as many rounds. `tell` is called with each tried tile.
///
/// # Errors
/// An error of the device, or why the kernel's own tile cannot be timed.
pub fn search<T: Timer>(
    timer: &mut T,
    own: &TileOptions,
    changes: &[Change],
    rounds: u32,
    mut tell: impl FnMut(&Tried),
) -> Result<Found, String> {
    timer.coming(changed(own, changes));
    let own_ready = timer.ready(own)?;
    let (mut best, mut best_ready): (TileOptions, Option<T::Ready>) = (own.clone(), None);
    let mut not_begun = 0;
    for (at, (knob, value)) in changes.iter().enumerate() {
        let tile = with(&best, knob, value);
        if tile == best {
            continue;
        }
        if !timer.goes_on() {
            not_begun += 1;
            continue;
        }
        let incumbent = best_ready.as_ref().unwrap_or(&own_ready);
        let mut challenger = None;
        let outcome = timer.ready(&tile).and_then(|ready| {
            let measured = InTurns::run(timer, incumbent, &ready, rounds)?;
            challenger = Some(ready).filter(|_| measured.is_gain());
            Ok(measured)
        });
        match &outcome {
            Ok(measured) => record!(
                debug,
                TUNE,
                "{knob}={value}: gain {:.1} %, spread {:.1} %",
                100.0 * measured.gain(),
                100.0 * measured.spread()
            ),
            Err(why) => record!(debug, TUNE, "{knob}={value}: not timed: {why}"),
        }
        tell(&Tried { changed: format!("{knob}={value}"), outcome });
        if let Some(ready) = challenger {
            timer.coming(changed(&tile, &changes[at + 1..]));
            (best, best_ready) = (tile, Some(ready));
        }
    }
    let confirmed = match &best_ready {
        Some(ready) => Some(InTurns::run(timer, &own_ready, ready, 3 * rounds)?),
        None => None,
    };
    let found = Found { tile: best, confirmed, not_begun };
    let gain = found.confirmed.as_ref().map_or(0.0, InTurns::gain);
    let words = if found.is_gain() { "faster than" } else { "no gain over" };
    record!(
        info,
        TUNE,
        "tile {}: {words} the kernel's own, {:.1} %, {not_begun} changes not begun",
        Listed(found.tile.iter().map(|(name, value)| format!("{name}={value}")), ", "),
        100.0 * gain
    );
    Ok(found)
}

/// The tiles that result from each change, without those equal to `tile`.
fn changed(tile: &TileOptions, changes: &[Change]) -> Vec<TileOptions> {
    changes.iter().map(|(knob, value)| with(tile, knob, value)).filter(|changed| changed != tile).collect()
}

/// The tile with one field changed. That field is placed last, so that earlier, incompatible fields are overridden.
fn with(tile: &TileOptions, knob: &str, value: &str) -> TileOptions {
    let mut tile = tile.clone();
    if let Some(at) = tile.iter().position(|(name, old)| name == knob && old != value) {
        tile.remove(at);
        tile.push((knob.to_owned(), value.to_owned()));
    }
    tile
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A simulated device whose tiles take known times, with noise and a drifting clock.
    struct Made {
        /// Seconds of each value of the only field.
        seconds: fn(u32) -> f64,
        /// Greatest noise, as a fraction of the time.
        noise: f64,
        /// Seconds that each burst adds to all later bursts.
        drift: f64,
        bursts: u32,
        state: u64,
    }

    impl Made {
        fn new(seconds: fn(u32) -> f64, noise: f64, seed: u64) -> Self {
            Self { seconds, noise, drift: 0.0, bursts: 0, state: seed.wrapping_mul(2) + 1 }
        }

        fn random(&mut self) -> f64 {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            (self.state >> 11) as f64 / (1u64 << 53) as f64
        }
    }

    impl Timer for Made {
        type Ready = u32;

        fn ready(&mut self, tile: &TileOptions) -> Result<u32, String> {
            let value: u32 = tile[0].1.parse().unwrap();
            if value == 3 { Err("3 does not go together".to_owned()) } else { Ok(value) }
        }

        fn burst(&mut self, &value: &u32) -> Result<f64, String> {
            self.bursts += 1;
            let drift = 1.0 + self.drift * f64::from(self.bursts);
            Ok((self.seconds)(value) * drift * (1.0 + self.noise * self.random()))
        }
    }

    fn run(mut made: Made) -> (Found, Vec<Tried>) {
        let own = vec![("stages".to_owned(), "1".to_owned())];
        let changes = ["2", "3", "4", "5"].map(|value| ("stages", value.to_owned()));
        let mut tried = Vec::new();
        let found = search(&mut made, &own, &changes, 7, |one| tried.push(one.clone())).unwrap();
        (found, tried)
    }

    #[test]
    fn a_tile_that_is_no_faster_is_not_kept_whatever_the_noise_and_the_drift() {
        let mut kept = 0;
        for seed in 0..200 {
            for (noise, drift) in [(0.002, 0.0), (0.05, 0.0), (0.01, 0.01), (0.3, 0.0)] {
                let (found, _) = run(Made { drift, ..Made::new(|_| 4e-5, noise, seed) });
                kept += u32::from(found.is_gain());
            }
        }
        // Chance lets some tiles pass: 4 tiles are tried 800 times.
        assert!(kept <= 4, "{kept} of 800");
    }

    #[test]
    fn the_fastest_tile_is_found_through_noise_and_confirmed() {
        for seed in 0..50 {
            let seconds = |value| [0.0, 1.0, 0.97, 0.5, 0.90, 0.93][value as usize];
            let (found, tried) = run(Made { drift: 0.003, ..Made::new(seconds, 0.02, seed) });
            assert_eq!(found.tile[0].1, "4", "seed {seed}");
            assert!(found.is_gain());
            let confirmed = found.confirmed.unwrap();
            assert_eq!(confirmed.incumbent.len(), 3 * 7, "three times the rounds of a try");
            let gain = confirmed.gain();
            assert!((gain - 0.111).abs() < 0.02, "{gain}");
            assert_eq!(tried.len(), 4);
            assert_eq!(tried[1].outcome, Err("3 does not go together".to_owned()));
        }
    }

    #[test]
    fn a_gain_within_the_spread_of_its_rounds_does_not_count() {
        let turns =
            |challenger: [f64; 5]| InTurns { incumbent: vec![1.0; 5], challenger: challenger.to_vec() };
        assert!(turns([0.96, 0.97, 0.96, 0.965, 0.97]).is_gain());
        // The medians are equal, but half of the rounds lie far from the median.
        assert!(!turns([0.90, 0.96, 0.965, 1.02, 1.05]).is_gain());
        assert!(!turns([0.996; 5]).is_gain(), "less than the least gain");
        assert_eq!(turns([0.5; 5]).medians(), (1.0, 0.5));
        assert!(!InTurns::default().is_gain());
        let as_far_apart = InTurns { incumbent: vec![1.25, 1.25, 1.25, 1.5, 1.5], challenger: vec![1.0; 5] };
        assert_eq!((as_far_apart.gain(), as_far_apart.spread()), (0.25, 0.25));
        assert!(!as_far_apart.is_gain(), "not beyond the spread");
    }

    #[test]
    fn a_quantile_lies_between_its_neighbours_in_proportion() {
        let sorted = [1.0, 3.0, 7.0];
        assert_eq!(
            [0.0, 0.25, 0.5, 0.75, 1.0].map(|part| quantile(&sorted, part)),
            [1.0, 2.0, 3.0, 5.0, 7.0]
        );
        assert!(quantile(&[], 0.5).is_nan());
    }

    #[test]
    fn the_changes_that_the_model_has_fastest_come_first_and_hopeless_ones_not_at_all() {
        let values = |values: [&str; 3]| values.map(str::to_owned).to_vec();
        let knobs = [("stages", values(["1", "2", "3"])), ("order", values(["a", "b", "c"]))];
        let micros = |change: Option<&Change>| match change {
            None => Some(10.0),
            Some(("order", value)) => Some(match value.as_str() {
                "a" => 9.0,
                "b" => 12.9,
                _ => 13.1,
            }),
            // The model does not include the number of stages.
            Some(_) => None,
        };
        let (changes, left_out) = by_model(&knobs, micros);
        let words: Vec<_> = changes.iter().map(|(knob, value)| format!("{knob}={value}")).collect();
        assert_eq!(words, ["order=a", "stages=1", "stages=2", "stages=3", "order=b"]);
        assert_eq!(left_out, 1);
        assert_eq!(by_model(&knobs, |_| None).0.len(), 6, "without a model all, in the order of the fields");
    }

    /// A simulated device whose time is up after a number of tiles.
    struct Limited(Made, std::cell::Cell<u32>);

    impl Timer for Limited {
        type Ready = u32;

        fn ready(&mut self, tile: &TileOptions) -> Result<u32, String> {
            self.0.ready(tile)
        }

        fn burst(&mut self, ready: &u32) -> Result<f64, String> {
            self.0.burst(ready)
        }

        fn goes_on(&self) -> bool {
            let left = self.1.get();
            self.1.set(left.saturating_sub(1));
            left > 0
        }
    }

    #[test]
    fn a_search_whose_time_is_up_begins_no_tile_and_confirms_what_it_has() {
        let own = vec![("stages".to_owned(), "1".to_owned())];
        let changes = ["2", "4", "5"].map(|value| ("stages", value.to_owned()));
        let mut limited = Limited(Made::new(|value| 1.0 / f64::from(value), 0.0, 1), 1.into());
        let mut tried = 0;
        let found = search(&mut limited, &own, &changes, 7, |_| tried += 1).unwrap();
        assert_eq!((found.tile[0].1.as_str(), tried, found.not_begun), ("2", 1, 2));
        assert!(found.is_gain());
    }

    /// A simulated device that logs the tiles that `coming` announced and the tiles that were requested.
    struct Listens(Made, Vec<String>);

    impl Timer for Listens {
        type Ready = u32;

        fn coming(&mut self, tiles: Vec<TileOptions>) {
            let values: Vec<_> = tiles.iter().map(|tile| tile[0].1.as_str()).collect();
            self.1.push(format!("coming {}", values.join(",")));
        }

        fn ready(&mut self, tile: &TileOptions) -> Result<u32, String> {
            self.1.push(tile[0].1.clone());
            self.0.ready(tile)
        }

        fn burst(&mut self, ready: &u32) -> Result<f64, String> {
            self.0.burst(ready)
        }
    }

    #[test]
    fn what_comes_next_is_said_before_the_first_tile_and_anew_of_a_better_one() {
        let own = vec![("stages".to_owned(), "1".to_owned())];
        let changes = ["1", "2", "3", "4", "5"].map(|value| ("stages", value.to_owned()));
        let seconds = |value| [0.0, 1.0, 1.1, 1.0, 0.5, 0.9][value as usize];
        let mut listens = Listens(Made::new(seconds, 0.0, 1), Vec::new());
        search(&mut listens, &own, &changes, 3, |_| ()).unwrap();
        assert_eq!(listens.1, ["coming 2,3,4,5", "1", "2", "3", "4", "coming 5", "5"]);
    }

    /// Tile of each burst.
    struct Noted(Vec<u32>);

    impl Timer for Noted {
        type Ready = u32;

        fn ready(&mut self, _: &TileOptions) -> Result<u32, String> {
            Ok(0)
        }

        fn burst(&mut self, &tile: &u32) -> Result<f64, String> {
            self.0.push(tile);
            Ok(1.0)
        }
    }

    #[test]
    fn each_tile_is_first_in_every_other_round() {
        let mut noted = Noted(Vec::new());
        InTurns::run(&mut noted, &1, &2, 3).unwrap();
        assert_eq!(
            noted.0,
            [1, 2, 1, 2, 2, 1, 1, 2],
            "one burst of each that does not count, then three rounds"
        );
    }

    #[test]
    fn a_hopeless_tile_costs_two_rounds() {
        let mut made = Made::new(f64::from, 0.0, 1);
        let measured = InTurns::run(&mut made, &1, &2, 99).unwrap();
        assert_eq!((measured.incumbent.len(), measured.challenger.len()), (2, 2));
    }

    #[test]
    fn a_changed_knob_is_said_last_and_one_that_keeps_its_value_stays() {
        let tile =
            [("lazy_rescale_log2", "6"), ("skip_row_max", "1")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let tile = tile.to_vec();
        assert_eq!(with(&tile, "lazy_rescale_log2", "6"), tile);
        let changed = with(&tile, "lazy_rescale_log2", "0");
        let expected = [("skip_row_max", "1"), ("lazy_rescale_log2", "0")];
        assert_eq!(changed, expected.map(|(k, v)| (k.to_owned(), v.to_owned())));
        assert_eq!(with(&tile, "no_such_knob", "1"), tile);
    }
}
