//! Choice of a scheme, by the model of kernels and links.

use std::fmt;

use fmha::MAX_ARRIVALS;

use super::Options;
use crate::error::{Error, Result};
use crate::model::{Estimate, estimate};
use crate::problem::{Problem, Whole};
use crate::scheme::{SCHEMES, Scheme, most_groups};

/// Scheme of a plan, and the verdict on each scheme.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Choice {
    /// The scheme that is chosen.
    pub scheme: Scheme,
    /// Reason for the choice.
    pub reason: String,
    /// Estimate of each scheme, or the reason why it does not take the problem.
    pub considered: Vec<(Scheme, Result<Estimate, String>)>,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "scheme      {}: {}", self.scheme, self.reason)?;
        for (scheme, outcome) in &self.considered {
            match outcome {
                Ok(estimate) => writeln!(f, "  {:<9} {estimate}", scheme.name())?,
                Err(refusal) => writeln!(f, "  {:<9} {refusal}", scheme.name())?,
            }
        }
        Ok(())
    }
}

/// Chooses the scheme that a group of `ranks` would use for a problem, and estimates every scheme. Nothing is
/// planned or sent.
///
/// # Errors
/// What is wrong with the problem; of no scheme that takes it, each one's refusal.
pub fn choose(problem: &Problem, ranks: u32, backward: bool, options: &Options) -> Result<Choice> {
    let whole = Whole::new(problem, 0, ranks)?.on_hosts(options.links.ranks_per_host);
    let whole = Whole { flags: may_wait(&whole, backward, options).is_ok(), ..whole };
    let whole = Whole { head_groups: head_groups(&whole, backward, options), ..whole };
    choose_for(&whole, backward, options)
}

/// Whether gathered keys should arrive while kernels wait for them, by the problem and the model alone,
/// without a device.
///
/// # Errors
/// The reason why not.
pub(super) fn may_wait(whole: &Whole, backward: bool, options: &Options) -> Result<(), String> {
    if options.flags == Some(false) {
        return Err("flags false was asked for".to_owned());
    }
    if whole.ranks == 1 {
        return Err("1 rank has all keys".to_owned());
    }
    if whole.ranks_per_host < whole.ranks {
        return Err(format!("{} ranks are on hosts of {}", whole.ranks, whole.ranks_per_host));
    }
    if whole.k.cu_seqlens.is_some() {
        return Err(format!("packed rows of {} sequences are a launch each", whole.k.batch));
    }
    if whole.fwd.asks_pairs() {
        return Err("kernels that wait ask no function and no mask as data".to_owned());
    }
    let runs: usize = (0..whole.ranks).map(|rank| whole.k.pieces(rank).len()).sum();
    if runs > MAX_ARRIVALS as usize {
        return Err(format!("{runs} runs of keys are more than {MAX_ARRIVALS}"));
    }
    if options.flags.is_none() {
        let of = |flags| {
            estimate(Scheme::Gather, &Whole { flags, ..whole.clone() }, backward, &options.links).seconds
                * 1e3
        };
        let [first, beside] = [false, true].map(of);
        if beside >= first {
            return Err(format!("{first:.3} ms, and {beside:.3} with kernels that wait, by the model"));
        }
    }
    Ok(())
}

/// Number of groups in which heads travel in Ulysses: the largest possible number or one, whichever the model
/// predicts to be faster. Backward uses one.
pub(super) fn head_groups(whole: &Whole, backward: bool, options: &Options) -> u32 {
    let seconds = |head_groups| {
        let whole = Whole { head_groups, ..whole.clone() };
        estimate(Scheme::Ulysses, &whole, backward, &options.links).seconds
    };
    let most = if backward { 1 } else { most_groups(whole) };
    if most > 1 && seconds(most) < seconds(1) { most } else { 1 }
}

pub(super) fn choose_for(whole: &Whole, backward: bool, options: &Options) -> Result<Choice> {
    let wrong = |text| Err(Error::new(whole.rank, "scheme", text));
    let consider = |scheme: Scheme| match scheme.takes(whole, backward, &options.kernels) {
        Ok(()) => Ok(estimate(scheme, whole, backward, &options.links)),
        Err(error) => Err(error.text),
    };
    let considered = SCHEMES.map(|scheme| (scheme, consider(scheme))).to_vec();
    let mut refusals =
        considered.iter().filter_map(|(scheme, outcome)| Some((*scheme, outcome.as_ref().err()?)));
    if let Some(scheme) = options.scheme {
        let refusal = refusals.find(|(refused, _)| *refused == scheme);
        return match refusal {
            Some((_, text)) => wrong(text.clone()),
            None => Ok(Choice { scheme, reason: "asked for".to_owned(), considered }),
        };
    }
    let room = options.links.memory;
    let takers = || considered.iter().filter_map(|(scheme, outcome)| Some((*scheme, outcome.as_ref().ok()?)));
    // Schemes that fit in memory come before schemes that do not.
    let cost = |estimate: &Estimate| (estimate.memory > room, estimate.seconds);
    let best = takers().min_by(|(_, a), (_, b)| {
        let ((a_is_over, a), (b_is_over, b)) = (cost(a), cost(b));
        a_is_over.cmp(&b_is_over).then(a.total_cmp(&b))
    });
    let Some((scheme, best)) = best else {
        let refusals: Vec<&str> = refusals.map(|(_, text)| text.as_str()).collect();
        return wrong(format!("no scheme takes this: {}", refusals.join("; ")));
    };
    let reason = match takers().count() {
        1 => "the only one that takes the problem".to_owned(),
        _ if best.memory > room => format!("none fits {room:.3e} bytes, and it is the fastest"),
        _ => {
            let fit = takers().filter(|(_, estimate)| estimate.memory <= room).count();
            format!("the fastest of {fit} that fit {room:.3e} bytes")
        }
    };
    Ok(Choice { scheme, reason, considered })
}

#[cfg(test)]
mod tests {
    use fmha::{DType, Dims, FwdProblem, MaskSpec};

    use super::*;
    use crate::model::Links;
    use crate::partition::Partition;
    use crate::scheme::last_home;

    fn zig_zag(tokens: u32, ranks: u32) -> Whole {
        let dims = Dims::batch(1).seqlens(tokens, tokens).heads(32, 8).head_dim(128);
        let whole = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
        Whole::new(&Problem::new(whole, Partition::zig_zag(tokens, ranks)), 0, ranks).unwrap()
    }

    fn waits(tokens: u32, options: &Options) -> Result<(), String> {
        may_wait(&zig_zag(tokens, 2).on_hosts(options.links.ranks_per_host), false, options)
    }

    /// Shortest queries of the last rank. With two ranks they are the second of four runs: they see the first
    /// run, which is the other rank's, and their own. With four ranks they see the first three runs.
    #[test]
    fn what_goes_home_behind_the_last_kernel_is_what_the_shortest_queries_see_of_others() {
        for (ranks, part) in [(2, 0.25), (4, 0.375)] {
            assert!((last_home(&zig_zag(8192, ranks)) - part).abs() < 1e-9, "{ranks}");
        }
        let seconds = |flags| {
            let whole = Whole { flags, ..zig_zag(8192, 4) };
            estimate(Scheme::Gather, &whole, true, &Links::default())
        };
        let (first, beside) = (seconds(false), seconds(true));
        // Half of the 3 / 4 of dK and dV that go home overlaps with the other kernels.
        let hidden = first.transfer - (beside.seconds - beside.compute);
        let home = 8192.0 * 8.0 * 256.0 * 4.0 * 0.375 / Links::default().bytes_per_second;
        assert!(hidden > home, "{first}, {beside}");
    }

    #[test]
    fn kernels_wait_where_the_keys_way_is_longer_than_waiting_costs_unless_told_otherwise() {
        let options = Options::default();
        assert_eq!(waits(8192, &options), Ok(()));
        let reason = waits(524_288, &options).unwrap_err();
        assert!(reason.ends_with("with kernels that wait, by the model"), "{reason}");
        assert_eq!(waits(524_288, &options.clone().flags(true)), Ok(()));
        assert_eq!(waits(8192, &options.clone().flags(false)).unwrap_err(), "flags false was asked for");
        let reason = may_wait(&zig_zag(8192, 64), false, &options).unwrap_err();
        assert_eq!(reason, "128 runs of keys are more than 64");
        let links: Links = "ranks_per_host = 1".parse().unwrap();
        let reason = waits(8192, &options.links(links)).unwrap_err();
        assert_eq!(reason, "2 ranks are on hosts of 1");
    }

    /// Four H200, of which one reads 1048576 keys in 0.931 ms, and an exchange of nothing takes 0.016.
    #[test]
    fn a_step_of_decoding_lasts_as_long_as_the_host_queues_its_message() {
        let dims = Dims { seqlen_q: 1, seqlen_k: 1 << 20, ..zig_zag(1 << 20, 4).fwd.dims };
        let whole = FwdProblem::batch(DType::Bf16, dims).write_lse(true);
        let problem =
            Problem::new(whole, Partition::replicated(1, 4)).keys(Partition::contiguous(1 << 20, 4));
        let whole = Whole::new(&problem, 0, 4).unwrap();
        let seconds = |queueing: &str| {
            // Rate of a device that has rested.
            let flops = 32.0 * 512.0 * f64::from(1 << 20) / (0.931e-3 * 1.2);
            let links = format!("latency = 16e-6\nfwd_flops = {flops}\n{queueing}").parse().unwrap();
            estimate(Scheme::Decode, &whole, false, &links).seconds
        };
        let alone = seconds("queueing = 1e-12");
        assert!((alone / 0.263e-3 - 1.0).abs() < 0.01, "{alone}");
        // One message, which costs the more the more ranks there are.
        assert_eq!(seconds(""), alone);
        assert!((seconds("queueing = 1e-3") - 4e-3).abs() < 1e-9);
    }

    #[test]
    fn heads_travel_in_groups_where_their_way_is_longer_than_launches_cost() {
        let groups = |whole: &Whole, backward, links: &str| {
            let options = Options::default().links(links.parse().unwrap());
            head_groups(whole, backward, &options)
        };
        // Each of two ranks has 4 kv heads, each of 16 ranks half a head.
        let [two, many] = [2, 16].map(|ranks| zig_zag(262_144, ranks));
        assert_eq!(groups(&two, false, ""), 4);
        assert_eq!(groups(&two, false, "latency = 1"), 1);
        assert_eq!(groups(&two, true, ""), 1);
        assert_eq!(groups(&many, false, ""), 1);
    }

    #[test]
    fn heads_whose_rows_the_group_would_refuse_do_not_travel() {
        let mut whole = Whole { most_rows: 4096, ..zig_zag(4096, 2) };
        assert!(choose_for(&whole, false, &Options::default().scheme(Scheme::Ulysses)).is_ok());
        whole.fwd = whole.fwd.dtype_o(DType::Bf16);
        whole.fwd.dtypes.qk = DType::E4m3Fn;
        whole.fwd.dtypes.v = DType::E4m3Fn;
        let error = choose_for(&whole, false, &Options::default().scheme(Scheme::Ulysses)).unwrap_err();
        assert_eq!(error.field, "scheme");
        assert!(error.text.starts_with("ulysses: 24") && error.text.contains("more than 4096"), "{error}");
        assert_ne!(choose_for(&whole, false, &Options::default()).unwrap().scheme, Scheme::Ulysses);
    }

    #[test]
    fn all_ranks_find_the_same_costs_whatever_their_rows() {
        let offsets = vec![0, 13, 13, 30, 41];
        let dims = Dims::batch(4).seqlens(17, 17).heads(4, 4).head_dim(16);
        let whole = FwdProblem::group(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
        for ranks in [2, 3, 4] {
            let problem = Problem::new(whole.clone(), Partition::zig_zag(41, ranks));
            let problem = problem.packed(offsets.clone(), offsets.clone());
            let found = |rank| {
                let whole = Whole::new(&problem, rank, ranks).unwrap();
                format!("{:?}", choose_for(&whole, false, &Options::default()).unwrap())
            };
            let first = found(0);
            assert!((1..ranks).all(|rank| found(rank) == first), "{ranks} ranks");
        }
    }

    #[test]
    fn the_reason_counts_the_schemes_that_fit() {
        let whole = zig_zag(65536, 8);
        let within = |memory: f64| {
            let links = format!("memory = {memory}").parse().unwrap();
            choose_for(&whole, false, &Options::default().links(links)).unwrap()
        };
        let all = within(1e15).considered.into_iter();
        let all: Vec<f64> = all.filter_map(|(_, outcome)| Some(outcome.ok()?.memory)).collect();
        for room in &all {
            let (fit, reason) = (all.iter().filter(|memory| *memory <= room).count(), within(*room).reason);
            assert!(reason.starts_with(&format!("the fastest of {fit} that fit ")), "{reason}");
        }
    }

    #[test]
    fn a_group_of_no_ranks_is_refused_and_a_host_has_one_rank_at_least() {
        let problem = Problem::new(zig_zag(64, 2).fwd, Partition::contiguous(64, 0));
        let error = choose(&problem, 0, false, &Options::default()).unwrap_err();
        assert_eq!((&*error.field, &*error.text), ("ranks", "0 ranks have no rows"));
        let costs = |hosts| {
            let whole = zig_zag(8192, 4).on_hosts(Some(hosts));
            format!("{:?}", choose_for(&whole, false, &Options::default()).unwrap())
        };
        assert_eq!(costs(0), costs(1));
    }

    /// The largest group is priced in time. A model that goes through all pairs of ranks would take minutes.
    #[test]
    fn as_many_ranks_as_a_group_may_have_are_priced() {
        let ranks = crate::group::MAX_RANKS;
        let dims = Dims { num_heads_q: ranks, num_heads_kv: ranks, ..zig_zag(2 * ranks, 2).fwd.dims };
        let problem =
            Problem::new(FwdProblem::batch(DType::Bf16, dims), Partition::zig_zag(2 * ranks, ranks));
        choose(&problem, ranks, true, &Options::default()).unwrap();
    }
}
