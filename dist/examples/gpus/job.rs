//! Jobs, as the words of the command give them.

use std::sync::Arc;
use std::time::Instant;

use fmha::{Bias, BwdProblem, DType, Device, Dims, FwdProblem, MaskSpec, PlanOptions};
use fmha_dist::{BwdPlan, FwdPlan, Group, Links, Options, Partition, Problem, Scheme};

use crate::AnyError;
use crate::bench::{Bench, MOST_SENT, Trouble, Way};
use crate::tensors::{documents, upload};

/// One job.
pub(crate) struct Job {
    pub(crate) operation: String,
    pub(crate) tokens: u32,
    pub(crate) masks: Vec<MaskSpec>,
    pub(crate) schemes: Vec<String>,
    pub(crate) repeats: usize,
}

impl Job {
    pub(crate) fn parse(words: &[String]) -> Result<Self, AnyError> {
        let [operation, tokens, masks, schemes, repeats] = words else {
            return Err(format!("{words:?} is not what, tokens, masks, schemes, how often").into());
        };
        Ok(Self {
            operation: operation.clone(),
            tokens: tokens.parse()?,
            masks: masks.split('/').map(str::parse).collect::<Result<_, _>>()?,
            schemes: schemes.split(',').map(str::to_owned).collect(),
            repeats: repeats.parse()?,
        })
    }

    pub(crate) fn run(
        &self,
        device: &Device,
        group: &Arc<dyn Group>,
        (start, measured): (Instant, &mut Option<Links>),
    ) -> Result<(), AnyError> {
        let (tokens, ranks) = (self.tokens, group.size());
        let trouble = match &*self.operation {
            "slow" => Some(Trouble::Slow),
            "dead" => Some(Trouble::Dead),
            _ => None,
        };
        let decodes = self.operation == "decode" || self.schemes == ["decode"];
        let seqlen_q = if decodes { 1 } else { tokens };
        let (seqlen_k, num_heads_q, num_heads_kv) = (tokens, 32, 8);
        let mut dims =
            Dims::batch(1).seqlens(seqlen_q, seqlen_k).heads(num_heads_q, num_heads_kv).head_dim(128);
        let (queries, keys) = if decodes {
            (Partition::replicated(1, ranks), Partition::contiguous(tokens, ranks))
        } else {
            (Partition::zig_zag(tokens, ranks), Partition::zig_zag(tokens, ranks))
        };
        let mut offsets = None;
        if self.operation == "packed" {
            let rows = documents(tokens);
            dims.batch = rows.len() as u32 - 1;
            let longest = rows.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0);
            (dims.seqlen_q, dims.seqlen_k) = (longest, longest);
            let buffer = upload(device, bytemuck::cast_slice(&rows))?;
            offsets = Some((rows, buffer));
        }
        let mut whole = match &offsets {
            None => FwdProblem::batch(DType::Bf16, dims),
            Some(_) => FwdProblem::group(DType::Bf16, dims),
        };
        if self.operation == "modified" {
            whole = whole.p_drop(0.1).bias(Bias::Alibi { per_batch: false });
        }
        let slopes: Vec<f32> = (1..=32).map(|head| (-0.25 * head as f32).exp2()).collect();
        let most_sent = if self.repeats > 0 { MOST_SENT } else { 1 << 10 };
        let mut bench = Bench {
            way: match &*self.operation {
                "capture" => Way::Replayed,
                "parts" => Way::Parts,
                _ => Way::Eager,
            },
            trouble,
            stream: device.stream()?,
            slopes: upload(device, bytemuck::cast_slice(&slopes))?,
            links: [device.memory().alloc(most_sent)?, device.memory().alloc(most_sent)?],
            device: device.clone(),
            group: group.clone(),
            whole,
            queries,
            keys,
            offsets,
            start,
            repeats: self.repeats,
        };
        if measured.is_none() && self.repeats > 0 && trouble.is_none() {
            *measured = Some(bench.links()?);
        }
        for &mask in &self.masks {
            bench.whole = bench.whole.clone().mask(mask).write_lse(true);
            if bench.is_first() {
                bench.say(&format!("{}, {tokens} tokens, mask {mask}, {ranks} devices", self.operation));
            }
            self.each(&bench, measured.unwrap_or_default())?;
        }
        Ok(())
    }

    fn each(&self, bench: &Bench, measured: Links) -> Result<(), AnyError> {
        let backward = matches!(&*self.operation, "backward" | "deterministic");
        let kernels = PlanOptions::default().deterministic(self.operation == "deterministic");
        let alone = match self.repeats {
            0 => {
                bench.device.plan_fwd(&bench.whole.clone().validate()?, &PlanOptions::default())?;
                if backward {
                    bench.device.plan_bwd(&BwdProblem::new(bench.whole.clone()).validate()?, &kernels)?;
                }
                None
            }
            _ => {
                let rows = bench.queries.rows();
                let inputs = [
                    bench.noise(1, rows, 32)?,
                    bench.noise(2, self.tokens, 8)?,
                    bench.noise(3, self.tokens, 8)?,
                    bench.noise(4, if backward { rows } else { 0 }, 32)?,
                ];
                let (whole, alone) = bench.alone(inputs, !backward)?;
                let gradients = backward.then(|| bench.backward_alone(&whole, &kernels)).transpose()?;
                Some((whole, alone, gradients))
            }
        };
        for name in &self.schemes {
            let (of, way) = name.split_once(':').unwrap_or((name, ""));
            let flags = match way {
                "flags" => Some(true),
                "whole" => Some(false),
                _ => None,
            };
            let scheme: Scheme = of.parse()?;
            let problem = Problem::new(bench.whole.clone(), bench.queries.clone()).keys(bench.keys.clone());
            let problem = match &bench.offsets {
                None => problem,
                Some((rows, _)) => problem.packed(rows.clone(), rows.clone()),
            };
            let mut links = measured;
            links.ranks_per_host = (scheme == Scheme::Mixed).then_some(2);
            let options =
                Options::default().scheme(scheme).kernels(kernels.clone()).flags(flags).links(links);
            let group = bench.group.clone();
            match &alone {
                None if backward => {
                    BwdPlan::new(&problem, (DType::Bf16, false), group, &bench.device, &options)?;
                }
                None => {
                    FwdPlan::new(&problem, group, &bench.device, &options)?;
                }
                Some((whole, _, Some(gradients))) => {
                    bench.backward(name, scheme, &problem, &options, whole, gradients)?;
                }
                Some((whole, alone, None)) => {
                    bench.forward(name, scheme, &problem, &options, whole, *alone)?;
                }
            }
        }
        Ok(())
    }
}
