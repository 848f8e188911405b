//! Masks: the keys that a query sees. Every mask is one band `lo <= j - i <= hi`, resolved per sequence, plus
//! some leading sink columns.

use std::fmt;
use std::str::FromStr;

use crate::error::ProblemError;

/// Start of the diagonal of a causal or window mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MaskAlign {
    /// The first key: the diagonal pairs query 0 with key 0.
    TopLeft,
    /// The last key: the diagonal pairs the last query with the last key.
    BottomRight,
}

/// Shape of a mask, in the form that the user gives.
#[doc(alias = "window_size")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MaskShape {
    /// Every query sees every key.
    None,
    /// Keys beyond the diagonal are hidden.
    Causal(MaskAlign),
    /// Keys from `left` before the diagonal to `right` beyond it, both included.
    #[doc(alias = "local")]
    Window {
        /// Number of keys before the diagonal; `None` = all.
        left: Option<u32>,
        /// Number of keys beyond the diagonal; `None` = all.
        right: Option<u32>,
        /// Start of the diagonal.
        align: MaskAlign,
    },
    /// Generic coordinates, as Composable Kernel's documentation defines them: key j is visible to
    /// query i iff `i - y + 1 <= j < min(i + x, seqlen_k)`.
    Generic {
        /// The coordinate `1 - lo`.
        y: i32,
        /// The coordinate `1 + hi`.
        x: i32,
    },
}

/// A mask: its shape, and how many leading keys (sink columns) the lower bound never hides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MaskSpec {
    /// Shape of the band.
    pub shape: MaskShape,
    /// Key `j < sink_columns` is visible below the lower bound too, but never beyond the upper one.
    #[doc(alias = "attention sinks")]
    pub sink_columns: u32,
}

/// The bounds of a mask before a sequence's lengths are known, relative to the diagonal. A device gets this form:
/// two optional numbers and the alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MaskBounds {
    /// Smallest visible `j - i - diag`.
    pub lo: Option<i64>,
    /// Largest visible `j - i - diag`.
    pub hi: Option<i64>,
    /// Defines the diagonal `diag`: 0 for top-left, `seqlen_k - seqlen_q` for bottom-right.
    pub align: MaskAlign,
}

/// Which bounds a mask has: a compile-time property of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MaskKind {
    /// The mask has no bounds: every key is visible.
    Full,
    /// The mask has an upper bound only.
    Upper,
    /// The mask has a lower bound, with or without an upper bound and sink columns.
    Band,
}

/// The one form that kernels see: key j is visible to query i iff `lo <= j - i <= hi`, or
/// `j < sink_columns` and `j - i <= hi`.
///
/// Bounds are clamped to `-seqlen_q..=seqlen_k`, which changes no result (`j - i` lies within) and keeps every sum
/// with a position inside 33 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MaskBand {
    /// Smallest visible `j - i`.
    pub lo: i64,
    /// Largest visible `j - i`.
    pub hi: i64,
    /// Number of leading keys that `lo` does not hide.
    pub sink_columns: i64,
}

/// Relation of a tile of scores to the band.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockClass {
    /// No key is visible to any query: a kernel skips the tile.
    Skipped,
    /// Some pairs are visible and others are not: the tile needs the mask.
    Edge,
    /// All pairs are visible: the tile needs no mask.
    Inside,
}

impl MaskSpec {
    /// The mask under which every key is visible.
    pub const NONE: Self = Self { shape: MaskShape::None, sink_columns: 0 };

    /// The causal mask, the last query aligned with the last key, as in FlashAttention.
    pub const CAUSAL: Self = Self { shape: MaskShape::Causal(MaskAlign::BottomRight), sink_columns: 0 };

    /// Limits of the keys that a query sees, relative to the mask's diagonal.
    #[must_use]
    pub fn bounds(self) -> MaskBounds {
        match self.shape {
            MaskShape::None => MaskBounds { lo: None, hi: None, align: MaskAlign::TopLeft },
            MaskShape::Causal(align) => MaskBounds { lo: None, hi: Some(0), align },
            MaskShape::Window { left, right, align } => {
                MaskBounds { lo: left.map(|left| -i64::from(left)), hi: right.map(i64::from), align }
            }
            MaskShape::Generic { y, x } => MaskBounds {
                lo: Some(1 - i64::from(y)),
                hi: Some(i64::from(x) - 1),
                align: MaskAlign::TopLeft,
            },
        }
    }

    /// Which limits of the mask a kernel must be compiled for.
    #[must_use]
    pub fn kind(self) -> MaskKind {
        match self.bounds() {
            MaskBounds { lo: Some(_), .. } => MaskKind::Band,
            MaskBounds { hi: Some(_), .. } => MaskKind::Upper,
            _ => MaskKind::Full,
        }
    }

    /// The band for one sequence of `seqlen_q` queries and `seqlen_k` keys.
    #[must_use]
    pub fn band(self, seqlen_q: u32, seqlen_k: u32) -> MaskBand {
        let MaskBounds { lo, hi, align } = self.bounds();
        let diag = align.diagonal(seqlen_q, seqlen_k);
        let (least, most) = (-i64::from(seqlen_q), i64::from(seqlen_k));
        MaskBand {
            lo: lo.map_or(least, |lo| (lo + diag).clamp(least, most)),
            hi: hi.map_or(most, |hi| (hi + diag).clamp(least, most)),
            // Without a lower bound the band hides no key that a sink column could show, so sink columns are dropped.
            sink_columns: lo.map_or(0, |_| i64::from(self.sink_columns).min(most)),
        }
    }

    /// Diagonal that ALiBi measures its distance from: this mask's, or bottom-right if it has none.
    #[must_use]
    pub fn alibi_align(self) -> MaskAlign {
        match self.shape {
            MaskShape::Causal(align) | MaskShape::Window { align, .. } => align,
            MaskShape::None | MaskShape::Generic { .. } => MaskAlign::BottomRight,
        }
    }
}

impl MaskAlign {
    /// The difference `j - i` on the diagonal.
    #[must_use]
    pub fn diagonal(self, seqlen_q: u32, seqlen_k: u32) -> i64 {
        match self {
            MaskAlign::TopLeft => 0,
            MaskAlign::BottomRight => i64::from(seqlen_k) - i64::from(seqlen_q),
        }
    }
}

impl MaskBand {
    /// Whether query `i` sees key `j`.
    #[must_use]
    #[inline]
    pub fn visible(self, i: u32, j: u32) -> bool {
        let (i, j) = (i64::from(i), i64::from(j));
        let distance = j - i;
        distance <= self.hi && (distance >= self.lo || j < self.sink_columns)
    }

    /// The half-open range of keys outside which no query of `rows` sees a key, except sink columns, which
    /// [`sink_range`](Self::sink_range) gives. `rows` is half-open and not empty.
    #[must_use]
    pub fn k_range(self, rows: std::ops::Range<u32>, seqlen_k: u32) -> std::ops::Range<u32> {
        let seqlen_k = i64::from(seqlen_k);
        let first = (i64::from(rows.start) + self.lo).clamp(0, seqlen_k);
        let last = (i64::from(rows.end) - 1 + self.hi + 1).clamp(first, seqlen_k);
        first as u32..last as u32
    }

    /// The keys before `k_range(rows, ..)` that some query of `rows` sees as sink columns.
    #[must_use]
    pub fn sink_range(self, rows: std::ops::Range<u32>, seqlen_k: u32) -> std::ops::Range<u32> {
        let last_visible = i64::from(rows.end) - 1 + self.hi + 1;
        let before = i64::from(self.k_range(rows, seqlen_k).start);
        0..self.sink_columns.min(last_visible).min(before).max(0) as u32
    }

    /// The band's keys of query `i` alone, half-open and within the sequence: its first key, and one past its last.
    /// Sink columns are left out, as in [`k_range`](Self::k_range).
    #[must_use]
    pub fn row_range(self, i: u32, seqlen_k: u32) -> std::ops::Range<u32> {
        self.k_range(i..i + 1, seqlen_k)
    }

    /// Relation of the tile `rows` x `keys` (half-open, not empty) to the band.
    #[must_use]
    pub fn block_class(self, rows: std::ops::Range<u32>, keys: std::ops::Range<u32>) -> BlockClass {
        let (i_first, i_last) = (i64::from(rows.start), i64::from(rows.end) - 1);
        let (j_first, j_last) = (i64::from(keys.start), i64::from(keys.end) - 1);
        let (least, most) = (j_first - i_last, j_last - i_first);
        let some_below_hi = least <= self.hi;
        let some_above_lo = most >= self.lo || j_first < self.sink_columns;
        if !some_below_hi || !some_above_lo {
            BlockClass::Skipped
        } else if most <= self.hi && (least >= self.lo || j_last < self.sink_columns) {
            BlockClass::Inside
        } else {
            BlockClass::Edge
        }
    }
}

impl fmt::Display for MaskSpec {
    /// The text form that [`MaskSpec::from_str`] reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = |b: Option<u32>| b.map_or("-1".to_owned(), |b| b.to_string());
        let letter = |align| if align == MaskAlign::TopLeft { "t" } else { "b" };
        match (self.shape, self.sink_columns) {
            // A mask that hides nothing is not changed by sink columns.
            (MaskShape::None, _) => write!(f, "0"),
            (MaskShape::Causal(align), 0) => write!(f, "{}", letter(align)),
            (MaskShape::Causal(align), sink) => write!(f, "{}:-1,0,{sink}", letter(align)),
            (MaskShape::Window { left, right, align }, sink) => {
                write!(f, "{}:{},{}", letter(align), bound(left), bound(right))?;
                if sink > 0 { write!(f, ",{sink}") } else { Ok(()) }
            }
            (MaskShape::Generic { y, x }, 0) => write!(f, "g:{y},{x}"),
            (MaskShape::Generic { y, x }, sink) => write!(f, "g:{y},{x},{sink}"),
        }
    }
}

impl FromStr for MaskSpec {
    type Err = ProblemError;

    /// Reads `0`; `1` = `t` (causal, top-left); `2` = `b` = `causal` (bottom-right); `t:l,r[,sink]` and
    /// `b:l,r[,sink]` (windows, −1 = unbounded); `g:y,x[,sink]` (generic coordinates).
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || {
            refused(format!(
                "mask `{text}` is none of 0, 1 or t, 2 or b or causal, t:LEFT,RIGHT[,SINK], b:LEFT,RIGHT[,SINK], \
                 g:Y,X[,SINK]"
            ))
        };
        let plain = |shape| Ok(MaskSpec { shape, sink_columns: 0 });
        let Some((letter, numbers)) = text.split_once(':') else {
            return match text {
                "0" => plain(MaskShape::None),
                "1" | "t" => plain(MaskShape::Causal(MaskAlign::TopLeft)),
                "2" | "b" | "causal" => plain(MaskShape::Causal(MaskAlign::BottomRight)),
                _ => Err(wrong()),
            };
        };
        let numbers: Vec<i64> = numbers
            .split(',')
            .map(|number| number.trim().parse().map_err(|_| wrong()))
            .collect::<Result<_, _>>()?;
        let (first, second, sink) = match numbers[..] {
            [first, second] => (first, second, 0),
            [first, second, sink] => (first, second, sink),
            _ => return Err(wrong()),
        };
        let sink_columns =
            u32::try_from(sink).map_err(|_| refused(format!("mask sink {sink} is negative or too large")))?;
        let window = |align| {
            Ok::<_, ProblemError>(MaskShape::Window {
                left: bound("left", first)?,
                right: bound("right", second)?,
                align,
            })
        };
        let coordinate = |name, value: i64| {
            i32::try_from(value).map_err(|_| refused(format!("mask {name} {value} does not fit 32 bits")))
        };
        let shape = match letter {
            "t" => window(MaskAlign::TopLeft)?,
            "b" => window(MaskAlign::BottomRight)?,
            "g" => MaskShape::Generic { y: coordinate("y", first)?, x: coordinate("x", second)? },
            _ => return Err(wrong()),
        };
        Ok(MaskSpec { shape, sink_columns })
    }
}

/// In text, −1 means unbounded.
fn bound(name: &str, value: i64) -> Result<Option<u32>, ProblemError> {
    match value {
        -1 => Ok(None),
        _ => u32::try_from(value)
            .map(Some)
            .map_err(|_| refused(format!("mask {name} {value} is below -1 or too large"))),
    }
}

fn refused(text: String) -> ProblemError {
    ProblemError::new("mask", text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visible_by_the_contract(spec: MaskSpec, i: i64, j: i64, seqlen_q: i64, seqlen_k: i64) -> bool {
        let diag = |align| if align == MaskAlign::TopLeft { 0 } else { seqlen_k - seqlen_q };
        let (above_lo, below_hi) = match spec.shape {
            MaskShape::None => (true, true),
            MaskShape::Causal(align) => (true, j <= i + diag(align)),
            MaskShape::Window { left, right, align } => (
                left.is_none_or(|left| j >= i + diag(align) - i64::from(left)),
                right.is_none_or(|right| j <= i + diag(align) + i64::from(right)),
            ),
            MaskShape::Generic { y, x } => (j > i - i64::from(y), j < (i + i64::from(x)).min(seqlen_k)),
        };
        below_hi && (above_lo || j < i64::from(spec.sink_columns))
    }

    fn all_specs() -> Vec<MaskSpec> {
        let mut shapes = vec![MaskShape::None];
        for align in [MaskAlign::TopLeft, MaskAlign::BottomRight] {
            shapes.push(MaskShape::Causal(align));
            for left in [None, Some(0), Some(1), Some(3)] {
                for right in [None, Some(0), Some(2)] {
                    shapes.push(MaskShape::Window { left, right, align });
                }
            }
        }
        for y in -3..7 {
            for x in -3..7 {
                shapes.push(MaskShape::Generic { y, x });
            }
        }
        let with_sink = |sink_columns| shapes.iter().map(move |&shape| MaskSpec { shape, sink_columns });
        with_sink(0).chain(with_sink(2)).collect()
    }

    #[test]
    fn the_band_shows_what_the_contract_shows() {
        for spec in all_specs() {
            for seqlen_q in 1..7u32 {
                for seqlen_k in 1..7u32 {
                    let band = spec.band(seqlen_q, seqlen_k);
                    for (i, j) in (0..seqlen_q).flat_map(|i| (0..seqlen_k).map(move |j| (i, j))) {
                        let expected = visible_by_the_contract(
                            spec,
                            i.into(),
                            j.into(),
                            seqlen_q.into(),
                            seqlen_k.into(),
                        );
                        assert_eq!(band.visible(i, j), expected, "{spec} {seqlen_q}x{seqlen_k} at {i},{j}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_ranges_of_one_row_are_exactly_the_keys_that_it_sees() {
        for spec in all_specs() {
            for (seqlen_q, seqlen_k) in [(1, 9), (7, 9), (9, 4)] {
                let band = spec.band(seqlen_q, seqlen_k);
                for i in 0..seqlen_q {
                    let seen = (0..seqlen_k).filter(|&j| band.visible(i, j));
                    let found = band.sink_range(i..i + 1, seqlen_k).chain(band.row_range(i, seqlen_k));
                    assert!(seen.eq(found), "{spec} {seqlen_q}x{seqlen_k} row {i}");
                }
            }
        }
    }

    #[test]
    fn skipped_tiles_are_empty_inside_tiles_are_full_and_ranges_lose_nothing() {
        for spec in all_specs() {
            let (seqlen_q, seqlen_k) = (7, 9);
            let band = spec.band(seqlen_q, seqlen_k);
            for start in 0..seqlen_q {
                for end in start + 1..=seqlen_q {
                    let range = band.k_range(start..end, seqlen_k);
                    let sinks = band.sink_range(start..end, seqlen_k);
                    for j in 0..seqlen_k {
                        let seen = (start..end).any(|i| band.visible(i, j));
                        assert!(
                            !seen || range.contains(&j) || sinks.contains(&j),
                            "{spec} {start}..{end} key {j}"
                        );
                    }
                    for (k_start, k_end) in
                        (0..seqlen_k).flat_map(|s| (s + 1..=seqlen_k).map(move |e| (s, e)))
                    {
                        let pairs = || (start..end).flat_map(|i| (k_start..k_end).map(move |j| (i, j)));
                        let class = band.block_class(start..end, k_start..k_end);
                        let seen = pairs().filter(|&(i, j)| band.visible(i, j)).count();
                        let exact = match seen {
                            0 => BlockClass::Skipped,
                            _ if seen == pairs().count() => BlockClass::Inside,
                            _ => BlockClass::Edge,
                        };
                        // Every tile class must be safe. It must be exact if no tile has both sink columns and
                        // other keys, and the band is not empty.
                        let one_kind = spec.sink_columns == 0 || k_end == k_start + 1;
                        let decided = class != BlockClass::Edge || one_kind && band.lo <= band.hi;
                        assert!(!decided || class == exact, "{spec} {start}..{end} {k_start}..{k_end}");
                    }
                }
            }
        }
    }

    #[test]
    fn text_reads_back_to_the_same_mask() {
        for spec in all_specs() {
            let read: MaskSpec = spec.to_string().parse().unwrap();
            assert_eq!(read.band(50, 70), spec.band(50, 70), "{spec}");
            assert_eq!(read.alibi_align(), spec.alibi_align(), "{spec}");
        }
        assert_eq!("2".parse(), Ok(MaskSpec::CAUSAL));
        assert_eq!("b".parse(), Ok(MaskSpec::CAUSAL));
        assert_eq!("causal".parse(), Ok(MaskSpec::CAUSAL));
    }

    #[test]
    fn wrong_text_is_refused_with_its_number() {
        for (text, part) in [
            ("3", "`3`"),
            ("t:1", "`t:1`"),
            ("b:-2,0", "left -2"),
            ("t:0,x", "`t:0,x`"),
            ("t:0,0,-4", "sink -4"),
        ] {
            let error = text.parse::<MaskSpec>().unwrap_err().text;
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
