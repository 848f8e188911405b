//! Classes of problems that one measured tile serves.

use std::fmt::Debug;

use crate::bwd::BwdProblem;
use crate::dtype::DType;
use crate::layout::{Shape, Strides};
use crate::operation::Operation;
use crate::problem::FwdProblem;
use crate::score::Bias;
use crate::spec::{BwdSpec, FwdSpec};

/// A class of problems that share one tile: they compile to the same code, have equal GQA ratios and similar
/// strides, and their lengths, heads and batch round to equal powers of two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileClass {
    operation: Operation,
    facts: String,
}

/// A tensor, reduced to the properties by which its strides matter.
type Tensor = (&'static str, Strides, Shape, DType);

impl TileClass {
    /// The class of a forward problem. A problem over a quantised cache has the class of its 16-bit equivalent,
    /// whose tile it uses.
    #[must_use]
    pub fn of_fwd(problem: &FwdProblem) -> Self {
        let wide = problem.over_wide_cache();
        let problem = wide.as_ref().unwrap_or(problem);
        Self::new(Operation::Forward, &FwdSpec::of(problem), problem, fwd_tensors(problem))
    }

    /// Class of a backward problem compiled as `spec`, which tells whether sums have a fixed order.
    #[must_use]
    pub fn of_bwd(problem: &BwdProblem, spec: &BwdSpec) -> Self {
        let fwd = &problem.fwd;
        let mut tensors = fwd_tensors(fwd);
        tensors.extend([
            ("dout", problem.dout, fwd.shape_o(), fwd.dtypes.o),
            ("dq", problem.dq, fwd.shape_q(), problem.dtype_grad),
            ("dk", problem.dk, fwd.shape_k(), problem.dtype_grad),
            ("dv", problem.dv, fwd.shape_v(), problem.dtype_grad),
        ]);
        if let (Some(dbias), Bias::Elementwise(bias)) = (problem.dbias, fwd.score.bias) {
            tensors.push(("dbias", dbias.strides, fwd.shape_bias(bias.broadcast), dbias.dtype));
        }
        Self::new(Operation::Backward, spec, fwd, tensors)
    }

    fn new(operation: Operation, spec: &dyn Debug, problem: &FwdProblem, tensors: Vec<Tensor>) -> Self {
        let dims = problem.dims;
        let power = |n: u32| n.checked_ilog2().map_or("0".to_owned(), |log| format!("2^{log}"));
        let strides = tensors.into_iter().map(|tensor| tensor.0.to_owned() + &stride_class(tensor));
        let mut facts = format!(
            "{spec:?} q {} k {} heads {} of {} batch {} strides {}",
            power(dims.seqlen_q),
            power(dims.seqlen_k),
            power(dims.num_heads_q),
            problem.gqa_ratio(),
            power(dims.batch),
            strides.collect::<Vec<_>>().join(" ")
        );
        // Broadcast axes of the bias decide how many heads and sequences read one matrix, and add to one gradient.
        if let Bias::Elementwise(bias) = problem.score.bias {
            facts += &format!(" bias {:?}", bias.broadcast);
        }
        // Which masks as data the problem has: kernels use other tiles with masks.
        let masks = &problem.masks;
        if !masks.is_empty() {
            let there = [masks.intervals.is_some(), masks.bits.is_some(), masks.block_lists.is_some()];
            facts += &format!(" masks {there:?}");
        }
        // How many keys a query lists, and how many keys the second cache has.
        if problem.walks_lists() {
            let second = problem.second.map(|second| (second.layout, second.lists.is_some()));
            facts += &format!(" walks {} second {second:?}", power(problem.most_walked_keys()));
        }
        if let Some(scales) = &problem.block_scales {
            facts += &format!(" block_scales {}", scales.format);
        }
        Self { operation, facts }
    }

    /// Key under which a kernel's tile for the class is stored.
    pub(super) fn key(&self, label: &str) -> String {
        format!("{} {label} {}", self.operation, self.facts)
    }
}

fn fwd_tensors(problem: &FwdProblem) -> Vec<Tensor> {
    let mut tensors = vec![
        ("q", problem.strides.q, problem.shape_q(), problem.dtypes.qk),
        ("k", problem.strides.k, problem.shape_k(), problem.dtypes.qk),
        ("v", problem.strides.v, problem.shape_v(), problem.dtypes.v),
        ("o", problem.strides.o, problem.shape_o(), problem.dtypes.o),
    ];
    if let Bias::Elementwise(bias) = problem.score.bias {
        tensors.push(("bias", bias.strides, problem.shape_bias(bias.broadcast), bias.dtype));
    }
    tensors
}

/// Properties of a tensor's strides that matter to a kernel: the power of two, 16 bytes at most, that divides each
/// stride (which decides how the tensor can be copied), whether heads or rows lie next to each other, and whether
/// an axis is broadcast.
fn stride_class((_, strides, shape, dtype): Tensor) -> String {
    let size = dtype.size_bytes().cast_signed();
    let axes = [
        (strides.batch, shape.batch),
        (strides.seq, shape.seq),
        (strides.head, shape.head),
        (strides.dim, shape.dim),
    ];
    // An axis of stride 1 is contiguous within a row, so it does not count.
    let counts = axes.into_iter().filter(|&(stride, extent)| extent > 1 && stride != 1);
    let counts: Vec<i64> = counts.map(|(stride, _)| stride.saturating_mul(size)).collect();
    let divides = |bytes: &i64| counts.iter().all(|stride| stride % bytes == 0);
    let bytes = [16, 8, 4, 2].into_iter().find(divides).unwrap_or(1);
    let order = match (shape.head > 1 && shape.seq > 1, strides.head < strides.seq) {
        (true, true) => "-heads",
        (true, false) => "-rows",
        (false, _) => "",
    };
    let broadcast = if counts.contains(&0) { "-broadcast" } else { "" };
    format!("{bytes}{order}{broadcast}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bwd::BiasGrad;
    use crate::score::{BiasBroadcast, ElementwiseBias};
    use crate::{Dims, MaskSpec};

    const DIMS: Dims = Dims::batch(2).seqlens(4096, 4096).heads(12, 4).head_dim(64);

    fn base() -> FwdProblem {
        FwdProblem::batch(DType::F16, DIMS)
    }

    fn of_fwd(change: fn(&mut FwdProblem)) -> TileClass {
        let mut problem = base();
        change(&mut problem);
        TileClass::of_fwd(&problem)
    }

    fn of_bwd(change: impl FnOnce(&mut BwdProblem)) -> TileClass {
        let mut problem = BwdProblem::new(base());
        change(&mut problem);
        TileClass::of_bwd(&problem, &BwdSpec::of(&problem))
    }

    fn biased(fwd: &mut FwdProblem, broadcast: BiasBroadcast) {
        let strides = Strides::bhsd(fwd.shape_bias(broadcast));
        fwd.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::F16, broadcast, strides });
    }

    #[test]
    fn strides_are_told_apart_by_what_divides_them_their_order_and_broadcasts() {
        let shape = Shape { batch: 2, seq: 5, head: 3, dim: 8 };
        let class = |strides, shape| stride_class(("q", strides, shape, DType::F16));
        assert_eq!(class(Strides::bshd(shape), shape), "16-heads");
        assert_eq!(class(Strides::bhsd(shape), shape), "16-rows");
        // Strides of axes with one element are unused, and the order of two equal axes does not matter.
        let one = |shape| class(Strides { batch: 240, seq: 8, head: 3, dim: 1 }, shape);
        assert_eq!((one(Shape { head: 1, ..shape }), one(shape)), ("16".to_owned(), "2-heads".to_owned()));
        assert_eq!(one(Shape { seq: 1, ..shape }), "2");
        let many = |seq, head| class(Strides { batch: 240, seq, head, dim: 1 }, Shape { batch: 1, ..shape });
        assert_eq!((many(8, 8).as_str(), many(24, 0).as_str()), ("16-rows", "16-heads-broadcast"));
    }

    #[test]
    fn a_tile_serves_problems_of_its_class_alone() {
        let class = of_fwd(|_| ());
        let same: [fn(&mut FwdProblem); 4] = [
            |p| p.score.softmax_scale = Some(0.3),
            // A quantised cache has the tile of the 16-bit one.
            |p| p.cache.dtype = Some(DType::E4m3Fn),
            // A longer sequence and a larger batch, which round to the same powers of two.
            |p| *p = FwdProblem::batch(DType::F16, Dims { seqlen_q: 5000, batch: 3, ..DIMS }),
            // Gaps between rows that are multiples of 16 bytes do not change the class.
            |p| p.strides.k.seq += 8,
        ];
        for (at, change) in same.into_iter().enumerate() {
            assert_eq!(of_fwd(change), class, "{at}");
        }
        let others: [fn(&mut FwdProblem); 8] = [
            |p| *p = FwdProblem::batch(DType::F16, Dims { seqlen_q: 2048, ..DIMS }),
            |p| p.write_lse = !p.write_lse,
            // A ratio of 2, which rounds to the same power of two as 3.
            |p| *p = FwdProblem::batch(DType::F16, Dims { num_heads_kv: 6, ..DIMS }),
            |p| p.strides.k.seq += 1,
            |p| p.strides.o.seq += 4,
            |p| p.strides.q = Strides::bhsd(p.shape_q()),
            |p| p.strides.v.head = 0,
            |p| p.strides.v.batch = 0,
        ];
        for (at, change) in others.into_iter().enumerate() {
            assert_ne!(of_fwd(change), class, "{at}");
        }
        assert_ne!(class.key("one"), class.key("two"));
    }

    #[test]
    fn what_a_backward_tile_was_measured_for_is_told_apart() {
        let class = of_bwd(|_| ());
        let same: [fn(&mut BwdProblem); 5] = [
            |p| p.fwd.score.softmax_scale = Some(0.3),
            // LSE, which the forward call writes with O, does not change a backward call's class.
            |p| p.fwd.write_lse = !p.fwd.write_lse,
            |p| *p = BwdProblem::new(FwdProblem::batch(DType::F16, Dims { seqlen_k: 5000, ..DIMS })),
            |p| p.dout.seq += 8,
            |p| p.dk.seq += 8,
        ];
        for (at, change) in same.into_iter().enumerate() {
            assert_eq!(of_bwd(change), class, "{at}");
        }
        let mut others: Vec<TileClass> = [
            (|p| p.fwd.mask = MaskSpec::CAUSAL) as fn(&mut BwdProblem),
            |p| p.fwd.score.softcap = Some(30.0),
            |p| p.fwd.dropout.p_drop = 0.1,
            |p| p.fwd.score.bias = Bias::Alibi { per_batch: false },
            |p| p.dtype_grad = DType::F32,
            |p| p.has_dlse = true,
            |p| *p = BwdProblem::new(FwdProblem::batch(DType::F16, Dims { head_dim_v: 128, ..DIMS })),
            |p| *p = BwdProblem::new(FwdProblem::batch(DType::F16, Dims { num_heads_kv: 6, ..DIMS })),
            |p| *p = BwdProblem::new(FwdProblem::batch(DType::F16, Dims { batch: 4, ..DIMS })),
            |p| p.dout.seq += 4,
            |p| p.dq = Strides::bhsd(p.fwd.shape_q()),
            |p| p.dk.seq += 4,
            |p| p.dv.seq += 4,
        ]
        .map(of_bwd)
        .to_vec();
        let problem = BwdProblem::new(base());
        let in_order = BwdSpec { deterministic: true, ..BwdSpec::of(&problem) };
        others.extend([class.clone(), TileClass::of_bwd(&problem, &in_order), of_fwd(|_| ())]);
        // A bias with each kind of broadcast, and then its gradient.
        for broadcast in BiasBroadcast::ALL {
            for gradient in [None, Some(DType::F16), Some(DType::F32)] {
                others.push(of_bwd(|p| {
                    biased(&mut p.fwd, broadcast);
                    let strides = Strides::bhsd(p.fwd.shape_bias(broadcast));
                    p.dbias = gradient.map(|dtype| BiasGrad { dtype, strides });
                }));
            }
        }
        for (at, class) in others.iter().enumerate() {
            assert!(!others[..at].contains(class), "{at}: {class:?}");
        }
    }

    #[test]
    fn a_bias_that_can_be_copied_in_fewer_bytes_is_another_class() {
        let aligned = of_fwd(|p| biased(p, BiasBroadcast::OneOne));
        assert_ne!(aligned, of_fwd(|_| ()));
        let odd = of_fwd(|p| {
            biased(p, BiasBroadcast::OneOne);
            if let Bias::Elementwise(bias) = &mut p.score.bias {
                bias.strides.seq += 1;
            }
        });
        assert_ne!(aligned, odd);
    }
}
