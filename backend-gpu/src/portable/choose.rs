//! The operation `choose` in successive launches: scores of an indexer, scores of blocks, and lists of the greatest
//! scores. Scores of up to [`CHUNK_BYTES`] lie in the workspace: the lists of such a chunk of rows are made while
//! its scores are still in the L2, so the matrix of all scores never exists.

use std::marker::PhantomData;

use fmha_core::abi::DevPtr;
use fmha_core::choose_params::{ChooseParams, IndexSpec, ROW_BINS, choose_params};
use fmha_core::sparse::{Indexer, ScoreSource, ValidChoose};
use fmha_core::tune::TileOptions;
use fmha_core::{Accuracy, Call, PlanOptions, Promises, Refusal, Result, ScoreSums, Workspace};

use super::RowKernel;
use crate::launches::{Launch, Launches, Stage};
use crate::recipe::{About, Choice, Facts as _, Kernel, Operand, Vendor, deterministic_rows};
use crate::steps::Steps;

/// Bytes of the scores of a chunk of rows; a single row may have more.
const CHUNK_BYTES: u64 = 32 << 20;

/// Fields of the tile of every choice.
const OWN_FIELDS: &[&str] = &["parts", "cluster"];

/// Most thread groups for one row's list; the next constant is the fewest keys of each.
const MOST_PARTS: u32 = 16;
const LEAST_KEYS: u32 = 8192;

/// Most warps or waves in a group that chooses.
const MOST_WARPS: u64 = 32;

/// Most pieces of a launch.
const MOST_PIECES: u64 = 1 << 31;

/// The kernel that writes an indexer's scores before lists are made of them.
pub trait ScoresIndex<V: Vendor>: Send + Sync + 'static {
    /// Name of the kernel in plans and refusals.
    const NAME: &'static str;
    /// Whether this is the slow fallback kernel that supports every indexer.
    const IS_FALLBACK: bool;
    /// Tile fields that a caller may set.
    const FIELDS: &'static [&'static str] = &[];

    /// A second argument of the launch after [`ChooseParams`]; `()` for none.
    type Beside;

    /// Checks that the device has the instructions that the kernel needs.
    ///
    /// # Errors
    /// The architecture, and what it lacks.
    fn runs_on(_facts: &V::Facts) -> Result<(), String> {
        Ok(())
    }

    /// Accepts an indexer, or scores from the caller (`None`), or refuses with the reason.
    ///
    /// # Errors
    /// The field that it does not take, and its number.
    fn takes(indexer: Option<&Indexer>) -> Result<(), String>;

    /// Alignment in bytes that k's address and strides need.
    fn alignment(_operand: Operand) -> u64 {
        1
    }

    /// Arithmetic in which the products of q and k are summed to a score.
    fn sums(_indexer: Option<&Indexer>, _facts: &V::Facts) -> ScoreSums {
        ScoreSums::F32
    }

    /// The launch that scores this many rows; `None` if the caller gives the scores. `fields` are the tile fields
    /// that the caller sets.
    ///
    /// # Errors
    /// The fields that make more groups than a grid has, or that are out of their range.
    fn launch(
        problem: &ValidChoose,
        indexer: &Indexer,
        rows: u64,
        facts: &V::Facts,
        fields: &TileOptions,
    ) -> Result<Option<Launch>, String>;

    /// The second argument of a call's launches.
    ///
    /// # Errors
    /// What the driver refuses.
    fn beside(call: &Call<'_, ValidChoose>, indexer: &Indexer, fields: &TileOptions) -> Result<Self::Beside>;

    /// A description of how the kernel computes, for plan reports.
    fn words() -> &'static str;
}

/// Scores that the caller gives, so that no indexer runs.
#[derive(Clone, Copy, Debug)]
pub struct NoIndexer;

impl<V: Vendor> ScoresIndex<V> for NoIndexer {
    const NAME: &'static str = "choose";
    const IS_FALLBACK: bool = false;
    type Beside = ();

    fn takes(indexer: Option<&Indexer>) -> Result<(), String> {
        match indexer {
            None => Ok(()),
            Some(_) => Err("source index: it takes given scores alone".to_owned()),
        }
    }

    fn launch(
        _: &ValidChoose,
        _: &Indexer,
        _: u64,
        _: &V::Facts,
        _: &TileOptions,
    ) -> Result<Option<Launch>, String> {
        Ok(None)
    }

    fn beside(_: &Call<'_, ValidChoose>, _: &Indexer, _: &TileOptions) -> Result<()> {
        Ok(())
    }

    fn words() -> &'static str {
        "given"
    }
}

/// Every indexer, a key to a lane.
#[derive(Clone, Copy, Debug)]
pub struct SimtIndexer;

impl<V: Vendor> ScoresIndex<V> for SimtIndexer {
    const NAME: &'static str = "simt";
    const IS_FALLBACK: bool = true;
    type Beside = ();

    fn takes(indexer: Option<&Indexer>) -> Result<(), String> {
        match indexer {
            Some(_) => Ok(()),
            None => Err("source given: it scores keys for an indexer".to_owned()),
        }
    }

    fn launch(
        problem: &ValidChoose,
        indexer: &Indexer,
        rows: u64,
        facts: &V::Facts,
        _: &TileOptions,
    ) -> Result<Option<Launch>, String> {
        let pieces = rows * u64::from(problem.seqlen_k.div_ceil(facts.row_group().1));
        let spec = IndexSpec::of(indexer);
        let name = <Self as ScoresIndex<V>>::NAME;
        facts.row_launch((Stage::Main, name), RowKernel::IndexScores, &spec, [pieces, 0]).map(Some)
    }

    fn beside(_: &Call<'_, ValidChoose>, _: &Indexer, _: &TileOptions) -> Result<()> {
        Ok(())
    }

    fn words() -> &'static str {
        "a key to a lane, heads and elements in their order, f32 sums"
    }
}

/// The recipe (checks, tile and launches) of a choice of keys whose indexer's scores kernel `S` computes.
#[derive(Clone, Debug)]
pub struct Choose<S> {
    chunk: Chunk,
    /// Tile fields of the kernel that computes the scores.
    fields: TileOptions,
    scores: PhantomData<S>,
}

/// Wishes of a caller for the launch that chooses.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Number of thread groups that make one row's list together; `None`: chosen for the device.
    parts: Option<u32>,
    /// Number of groups of a cluster for one row's list; `None`: chosen for the device.
    cluster: Option<u32>,
    /// Tile fields of the kernel that computes the scores.
    fields: TileOptions,
}

/// Number of rows in a chunk, and the offsets of its scores in the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunk {
    rows: u64,
    /// Offset of the scores of keys, unless they are an output.
    keys: Option<u64>,
    /// Offset of the scores of blocks, unless they are an output.
    blocks: Option<u64>,
    /// Number of thread groups that make one row's list together.
    parts: u32,
    /// Bytes of the histograms of rows that several groups share. They lie first, since each run clears them; the
    /// counts of runs follow.
    zeroed: u64,
    bytes: u64,
}

impl Chunk {
    /// The chunk of a problem. `group`: lanes of a row kernel.
    fn of(problem: &ValidChoose, group: u64, parts: impl Fn(u64) -> u32) -> Self {
        let has_blocks = problem.blocks.is_some();
        let key_bytes = 4 * u64::from(problem.seqlen_k);
        let block_bytes = 4 * u64::from(problem.num_entries());
        let keys = problem.indexer().is_some() && (has_blocks || !problem.write_scores);
        let blocks = has_blocks && !problem.write_scores;
        let of_row = if keys { key_bytes } else { 0 } + if blocks { block_bytes } else { 0 };
        let widest = u64::from(problem.seqlen_k.max(problem.num_entries())).div_ceil(group).max(1);
        let by_pieces = (MOST_PIECES / group / widest).max(1);
        let rows = (CHUNK_BYTES / of_row.max(1)).clamp(1, problem.rows().max(1)).min(by_pieces);
        // Histograms are cleared once per run, so rows are only split among groups if there is one chunk.
        let parts = if rows >= problem.rows() && problem.topk > 0 { parts(rows) } else { 1 };
        let whole = |bytes: u64| bytes.next_multiple_of(Workspace::ALIGN as u64);
        let zeroed = if parts > 1 { whole(rows * ROW_BINS * 4) } else { 0 };
        let counts = if parts > 1 { whole(rows * u64::from(parts) * MOST_WARPS * 8) } else { 0 };
        let keys_at = zeroed + counts;
        let blocks_at = keys_at + if keys { whole(rows * key_bytes) } else { 0 };
        let bytes = blocks_at + if blocks { rows * block_bytes } else { 0 };
        let (keys, blocks) = (keys.then_some(keys_at), blocks.then_some(blocks_at));
        Self { rows, keys, blocks, parts, zeroed, bytes }
    }
}

impl<S: ScoresIndex<V>, V: Vendor> Kernel<ValidChoose, V> for Choose<S> {
    type Tile = Wanted;

    fn about() -> About<ValidChoose> {
        About { is_fallback: S::IS_FALLBACK, ..About::new(S::NAME) }
    }

    fn runs_on(facts: &V::Facts) -> Result<(), String> {
        S::runs_on(facts)
    }

    fn fit(
        problem: &ValidChoose,
        facts: &V::Facts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<Wanted, Refusal> {
        let refuse = |text: String| Refusal::new(S::NAME, text);
        S::takes(problem.indexer()).map_err(refuse)?;
        let bits = S::sums(problem.indexer(), facts).bits();
        if options.accuracy == Accuracy::Exact && bits < ScoreSums::F32.bits() {
            return Err(refuse(format!("accuracy exact: scores summed to {bits} bits")));
        }
        let mut wanted = Wanted { parts: None, cluster: None, fields: TileOptions::new() };
        for (name, value) in fields {
            let groups = match name.as_str() {
                "parts" => &mut wanted.parts,
                "cluster" => &mut wanted.cluster,
                own if S::FIELDS.contains(&own) => {
                    wanted.fields.push((name.clone(), value.clone()));
                    continue;
                }
                _ => {
                    let known = [OWN_FIELDS, S::FIELDS].concat().join(", ");
                    return Err(refuse(format!("tile {name}={value} is unknown (known: {known})")));
                }
            };
            let number = value.parse().ok().filter(|number| (1..=MOST_PARTS).contains(number));
            let number =
                number.ok_or_else(|| refuse(format!("tile {name}={value} is not in 1..={MOST_PARTS}")))?;
            *groups = Some(number);
        }
        if let Wanted { parts: Some(parts), cluster: Some(cluster), .. } = wanted {
            return Err(refuse(format!(
                "tile parts={parts} beside cluster={cluster}: a row's list is made one way"
            )));
        }
        Ok(wanted)
    }

    fn plan(
        wanted: Wanted,
        problem: &ValidChoose,
        facts: &V::Facts,
        _: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |text: String| Refusal::new(S::NAME, text);
        let Wanted { parts: wanted, cluster, fields } = wanted;
        let (group_name, group) = facts.row_group();
        let own_lists = |at, rows| match wanted {
            None => facts.lists_launch(at, rows, problem.num_entries(), cluster),
            Some(_) => Ok(None),
        };
        let has_own_lists = own_lists((Stage::Lists, "choose_lists"), 1).map_err(refuse)?.is_some();
        if let Some(cluster) = cluster.filter(|_| problem.topk == 0) {
            return Err(refuse(format!("tile cluster={cluster}: topk 0, so no list is made")));
        }
        if let Some(cluster) = cluster.filter(|_| !has_own_lists) {
            return Err(refuse(format!("tile cluster={cluster}: {} has no clusters", facts.arch())));
        }
        let chunk = Chunk::of(problem, group.into(), |rows| {
            if has_own_lists {
                return 1;
            }
            // Groups are chosen so that each has a multiprocessor to itself, and has enough keys to be worth
            // starting.
            let there = u64::from(facts.groups_at_once()) / rows.max(1);
            let by_keys = problem.num_entries() / LEAST_KEYS;
            wanted.unwrap_or((there.min(MOST_PARTS.into()) as u32).min(by_keys).max(1))
        });
        if let Some(wanted) = wanted.filter(|&wanted| wanted != chunk.parts) {
            let (rows, all, topk) = (chunk.rows, problem.rows(), problem.topk);
            return Err(refuse(format!("tile parts={wanted}: {rows} of {all} rows at a time, topk {topk}")));
        }
        let index = match problem.indexer() {
            Some(indexer) => S::launch(problem, indexer, chunk.rows, facts, &fields).map_err(refuse)?,
            None => None,
        };
        let stage = |own| if index.is_some() { own } else { Stage::Main };
        let mut after = Vec::new();
        if problem.blocks.is_some() {
            let blocks = (chunk.rows * u64::from(problem.num_entries())).div_ceil(group.into());
            let at = (stage(Stage::BlockScores), "choose_blocks");
            after.push(facts.row_launch(at, RowKernel::BlockScores, &1, [blocks, 0]).map_err(refuse)?);
        }
        let mut list_words = match chunk.parts {
            1 => format!("a group of threads to a row; {group_name} writes a run of keys"),
            parts => format!("{parts} groups of threads to a row; {group_name} writes a run of keys"),
        };
        let own = if after.is_empty() { stage(Stage::Lists) } else { Stage::Lists };
        let own_launch = match problem.topk {
            0 => None,
            _ => own_lists((own, "choose_lists"), chunk.rows).map_err(refuse)?,
        };
        if let Some((launch, words)) = own_launch {
            after.push(launch);
            list_words = words;
        } else if problem.topk > 0 {
            let steps: &[(i32, &'static str)] = match chunk.parts {
                1 => &[(0, "choose_lists")],
                _ => &[
                    (1, "choose_digit"),
                    (2, "choose_digit"),
                    (3, "choose_digit"),
                    (4, "choose_counts"),
                    (5, "choose_lists"),
                ],
            };
            let groups = chunk.rows * u64::from(chunk.parts);
            for (at, (step, name)) in steps.iter().enumerate() {
                let stage = if at == 0 { own } else { Stage::Lists };
                let launch = facts.row_launch((stage, name), RowKernel::Choose, step, [groups, 0]);
                after.push(launch.map_err(refuse)?);
            }
        }
        let mut all = index.into_iter().chain(after);
        let Some(main) = all.next() else {
            return Err(refuse("topk 0: there is nothing to launch".to_owned()));
        };
        let launches = Launches::new([], main, all);
        let mut details = vec![
            ("scores", S::words().to_owned()),
            ("rows at a time", format!("{} of {}", chunk.rows, problem.rows())),
        ];
        if problem.topk > 0 {
            details.push(("lists", list_words));
        }
        let score_sums = S::sums(problem.indexer(), facts);
        let is_exact = score_sums.bits() >= ScoreSums::F32.bits();
        Ok(Choice {
            kernel: Self { chunk, fields, scores: PhantomData },
            launches,
            workspace: Workspace { bytes: chunk.bytes, zeroed_bytes: chunk.zeroed },
            // Results are deterministic: a row's scores have a fixed order of sums, and counts are integers.
            promises: Promises {
                row_invariant: true,
                accuracy: if is_exact { Accuracy::Exact } else { Accuracy::Fast },
                score_sums,
                ..deterministic_rows()
            },
            details,
        })
    }

    fn alignment(&self, _: &ValidChoose, operand: Operand) -> u64 {
        S::alignment(operand)
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidChoose>) -> Result<()> {
        let (problem, args, chunk) = (call.problem, call.args, self.chunk);
        let beside = problem.indexer().map(|indexer| S::beside(call, indexer, &self.fields)).transpose()?;
        let beside =
            beside.as_ref().map_or(std::ptr::null_mut(), |it| std::ptr::from_ref(it).cast_mut().cast());
        let workspace = args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let given = args.given.map_or(0, |slice| slice.as_ptr() as u64);
        let written = args.scores.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let [key_row, entry_row] =
            [problem.seqlen_k, problem.num_entries()].map(|entries| 4 * u64::from(entries));
        for row in (0..problem.rows()).step_by(chunk.rows as usize) {
            // Scores of keys are an input, an output, or lie in the workspace.
            let keys = match (problem.source, chunk.keys) {
                (ScoreSource::Given, _) => given + row * key_row,
                (_, Some(at)) => workspace + at,
                (_, None) => written + row * key_row,
            };
            let scores = match (problem.blocks, chunk.blocks) {
                (None, _) => keys,
                (Some(_), Some(at)) => workspace + at,
                (Some(_), None) => written + row * entry_row,
            };
            let params = choose_params(problem, args, [keys, scores]);
            let row_end = problem.rows().min(row + chunk.rows) as i32;
            let mut params = ChooseParams {
                row_begin: row as i32,
                row_end,
                parts: chunk.parts.cast_signed(),
                bins: DevPtr::new(workspace),
                runs: DevPtr::new(workspace + chunk.zeroed),
                ..params
            };
            // Only the first launch has a second argument; the driver reads as many arguments as a kernel declares.
            let mut arguments = [(&raw mut params).cast(), beside];
            // SAFETY: each kernel takes one ChooseParams, and the scoring kernel its second argument; core saw that
            // the memory covers the problem, and the workspace is as large as the plan says.
            unsafe { steps.launch_all(&mut arguments, call.stream)? };
        }
        Ok(())
    }
}
