//! Operands of a second cache.

use super::{DevSlice, SeqArgs};
use crate::layout::Totals;
use crate::setters::with_setters;

with_setters! {
    /// Operands of the problem's [`second`](crate::FwdProblem::second) cache.
    #[derive(Clone, Copy, Debug)]
    #[non_exhaustive]
    pub struct SecondArgs<'a> {
        fixed {
            /// K of the second cache.
            pub k: DevSlice<'a>,
            /// V of the second cache; `None` where V lies in K's rows.
            pub v: Option<DevSlice<'a>>,
        }
        set {
            /// Lengths, pages and lists of the second cache's keys. Fields about queries are `None` here, since the
            /// call's own `seq` has them.
            pub seq: SeqArgs<'a>,
            /// Endpoints of the second cache's intervals of visible keys, iff it has intervals.
            pub intervals: Option<DevSlice<'a>>,
        }
    }
}

impl<'a> SecondArgs<'a> {
    /// Makes arguments of K, and of V unless it lies in K's rows. Setters add the others.
    #[must_use]
    pub fn new(k: DevSlice<'a>, v: impl Into<Option<DevSlice<'a>>>) -> Self {
        Self { k, v: v.into(), seq: SeqArgs::default(), intervals: None }
    }

    /// Lengths and places of a call on this cache alone: queries from `first`, keys from here.
    #[must_use]
    pub fn seq_beside(&self, first: &SeqArgs<'a>) -> SeqArgs<'a> {
        SeqArgs {
            totals: Totals { total_q: first.totals.total_q, ..self.seq.totals },
            cu_seqlens_q: first.cu_seqlens_q,
            seqused_q: first.seqused_q,
            ..self.seq
        }
    }
}
