//! Values of special registers.

use super::cluster::Launch;
use super::warp::Warp;
use crate::memory::SHARED_BITS;
use crate::op::Special;

pub(super) fn fill_specials(
    warp: &mut Warp,
    launch: &Launch,
    cluster: u32,
    block: [u32; 3],
    offset: [u32; 3],
    rank: u32,
) {
    let c = &launch.config;
    let [bx, by, _] = c.block;
    let first = warp.index * 32;
    let clusters: [u32; 3] = std::array::from_fn(|i| c.grid[i] / c.cluster[i]);
    let total = launch.program.dynamic_base + c.dynamic_shared;
    for &(reg, special) in &launch.program.specials {
        for lane in 0..32u32 {
            let t = first + lane;
            let value = match special {
                Special::Tid(0) => t % bx,
                Special::Tid(1) => t / bx % by,
                Special::Tid(_) => t / bx / by,
                Special::Ntid(i) => c.block[usize::from(i)],
                Special::Ctaid(i) => block[usize::from(i)],
                Special::Nctaid(i) => c.grid[usize::from(i)],
                Special::Laneid => lane,
                Special::Warpid => warp.index,
                Special::Nwarpid => c.block.iter().product::<u32>().div_ceil(32),
                Special::Smid => cluster % launch.options.num_sms,
                Special::Nsmid => launch.options.num_sms,
                Special::Gridid | Special::Envreg => 0,
                Special::LanemaskEq => 1 << lane,
                Special::LanemaskLt => (1 << lane) - 1,
                Special::LanemaskLe => u32::MAX >> (31 - lane),
                Special::LanemaskGt => !(u32::MAX >> (31 - lane)),
                Special::LanemaskGe => !((1 << lane) - 1),
                Special::ClusterId(i) => block[usize::from(i)] / c.cluster[usize::from(i)],
                Special::NclusterId(i) => clusters[usize::from(i)],
                Special::ClusterCtaid(i) => offset[usize::from(i)],
                Special::ClusterNctaid(i) => c.cluster[usize::from(i)],
                Special::ClusterCtarank => rank,
                Special::ClusterNctarank => c.cluster.iter().product(),
                Special::DynamicSmemSize => c.dynamic_shared,
                Special::TotalSmemSize | Special::AggrSmemSize => total,
                Special::ReservedSmem => crate::decode::RESERVED_SHARED,
                Special::Shared { at, .. } => rank << SHARED_BITS | at,
            };
            warp.put(reg, lane as usize, u64::from(value));
        }
    }
}
