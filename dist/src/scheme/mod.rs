//! Schemes: which rank computes what, and what moves between ranks. Each scheme is a file that gives its
//! steps once: `forward` and `backward` share the exchange of keys and values.

mod decode;
mod gather;
mod ring;
mod ulysses;

pub(crate) use gather::last_home;
pub(crate) use ulysses::most_groups;

use std::fmt;

use fmha::{Device, PlanOptions};

use crate::builder::Builder;
use crate::error::{Error, Result};
use crate::problem::{Gradients, Whole};
use crate::program::Program;

/// Distribution of attention over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scheme {
    /// Every rank gathers the keys and values that its queries see, and attends once: O, LSE and dQ have the
    /// bits of one device wherever a row's bits do not depend on how many rows a call has. Memory: the whole
    /// K and V.
    Gather,
    /// Keys and values go round; each rank attends to those it has, and merges. Memory: two ranks' K and V.
    Ring,
    /// Keys and values are gathered inside a host and go round hosts, whose links are slower. Memory: two
    /// hosts' K and V.
    Mixed,
    /// Heads travel: every rank has some heads of all rows. The bits of one device; as many ranks as heads divide into.
    Ulysses,
    /// Every rank has all queries and a part of the cache; O and LSE are exchanged once. Forward alone.
    Decode,
}

/// All schemes, in the order in which a planner tries them.
pub const SCHEMES: [Scheme; 5] =
    [Scheme::Gather, Scheme::Ulysses, Scheme::Ring, Scheme::Mixed, Scheme::Decode];

impl Scheme {
    /// The name in options and plans.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gather => "gather",
            Self::Ring => "ring",
            Self::Mixed => "mixed",
            Self::Ulysses => "ulysses",
            Self::Decode => "decode",
        }
    }

    /// Whether a forward call's results have the bits of one device, whatever the number of ranks, in
    /// `batch_invariant` mode.
    #[must_use]
    pub const fn has_bits_of_one_device(self) -> bool {
        matches!(self, Self::Gather | Self::Ulysses)
    }

    /// Whether a forward call's rows have the bits of one device, whatever the number of ranks, in `row_invariant`
    /// mode.
    #[must_use]
    pub const fn has_rows_of_one_device(self) -> bool {
        matches!(self, Self::Gather)
    }

    /// Whether it takes the problem.
    ///
    /// # Errors
    /// The field and the number that it does not take.
    pub(crate) fn takes(self, whole: &Whole, backward: bool, options: &PlanOptions) -> Result<()> {
        let refuse =
            |field: &str, text: String| Err(Error::new(whole.rank, field, format!("{self}: {text}")));
        let replicated = whole.q.partition.is_replicated();
        if replicated && self != Self::Decode && whole.ranks > 1 {
            return refuse("partition", "all ranks have all queries, which is for decode".to_owned());
        }
        for (wish, asked, kept) in [
            ("row_invariant", options.row_invariant, self.has_rows_of_one_device()),
            ("batch_invariant", options.batch_invariant, self.has_bits_of_one_device()),
        ] {
            if asked && (backward || !kept) {
                let what = match (backward, self) {
                    (true, _) => "dK and dV are summed over",
                    (false, Self::Ulysses) => "heads travel between",
                    (false, _) => "a row is summed over",
                };
                return refuse(wish, format!("{wish} true is not kept: {what} {} ranks", whole.ranks));
            }
        }
        let of_ranks = || (0..whole.ranks).map(|rank| (rank, whole.k.pieces(rank)));
        let aligned = match self {
            Self::Ulysses => Ok(()),
            Self::Gather | Self::Mixed => whole.queries_begin_blocks(),
            Self::Ring | Self::Decode => {
                whole.queries_begin_blocks().and_then(|()| whole.keys_begin_blocks(of_ranks()))
            }
        };
        aligned.or_else(|text| refuse("masks", text))?;
        match self {
            Self::Gather | Self::Ring => Ok(()),
            Self::Mixed => {
                ring::takes_hosts(whole)?;
                let axis = whole.k.by_hosts(whole.ranks_per_host)?;
                let hosts = 0..whole.ranks / whole.ranks_per_host;
                let of_hosts = hosts.map(|host| (host, axis.pieces(host)));
                whole.keys_begin_blocks(of_hosts).or_else(|text| refuse("masks", text))
            }
            Self::Ulysses => ulysses::takes(whole),
            Self::Decode => decode::takes(whole, backward),
        }
    }

    pub(crate) fn forward(self, whole: &Whole, device: &Device, options: &PlanOptions) -> Result<Program> {
        let mut builder = Builder::new(whole, device, options);
        match self {
            Self::Gather => gather::forward(&mut builder),
            Self::Ring => ring::forward(&mut builder, 1),
            Self::Mixed => ring::forward(&mut builder, whole.ranks_per_host),
            Self::Ulysses => ulysses::forward(&mut builder),
            Self::Decode => decode::forward(&mut builder),
        }?;
        Ok(builder.finish())
    }

    pub(crate) fn backward(
        self,
        whole: &Whole,
        wanted: Gradients,
        device: &Device,
        options: &PlanOptions,
    ) -> Result<Program> {
        let mut builder = Builder::new(whole, device, options);
        match self {
            Self::Gather => gather::backward(&mut builder, wanted),
            Self::Ring => ring::backward(&mut builder, wanted, 1),
            Self::Mixed => ring::backward(&mut builder, wanted, whole.ranks_per_host),
            Self::Ulysses => ulysses::backward(&mut builder, wanted),
            Self::Decode => decode::takes(whole, true),
        }?;
        builder.sum_captured()?;
        Ok(builder.finish())
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Scheme {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || SCHEMES.map(Self::name).join(", ");
        let found = SCHEMES.into_iter().find(|scheme| scheme.name() == text);
        found.ok_or_else(|| format!("scheme `{text}` is none of {}", known()))
    }
}
