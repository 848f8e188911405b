//! Asynchronous copies: `cp.async`, `cp.async.bulk`, its tensor and reducing forms. PTX ISA 9.7.9.25.

use super::cluster::{Cluster, Step};
use super::ldst::{Target, bank_waves};
use super::tensor::TensorMap;
use super::warp::{PendingCopy, Wait, Warp, lanes};
use super::{Exec, fault};
use crate::ast::Space;
use crate::fault::{Fault, FaultKind};
use crate::hb::Clocks;
use crate::memory::{misaligned, out_of_bounds};
use crate::op::{Bulk, Code, Completion, Inst, Program, Route};

/// One asynchronous operation, its operands evaluated.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(super) bulk: Bulk,
    pub(super) map: Option<TensorMap>,
    pub(super) coords: [i32; 5],
    /// Global address, or source in shared memory for block-to-block copies.
    pub(super) global: u64,
    pub(super) source: (u32, u32),
    pub(super) bytes: u32,
    /// Block and offset of each copy in shared memory, and of the barrier it completes on.
    pub(super) shared: Vec<(u32, u32)>,
    pub(super) bars: Vec<(u32, u32)>,
    /// Issuer of the job, for reports and bulk groups.
    pub(super) cta: u32,
    pub(super) warp: u32,
    pub(super) lane: usize,
    pub(super) pc: u32,
    pub(super) group: u32,
    pub(super) clocks: Clocks,
    /// Bytes that the job has read of shared memory, where that has been waited for and its writes have not.
    pub(super) taken: Option<Vec<u8>>,
}

impl Cluster {
    pub(super) fn copy_async(&mut self, warp: &mut Warp, inst: &Inst, active: u32) -> Exec<()> {
        match inst.code {
            Code::CpAsync { bytes, dst_offset, src_offset } => {
                let n = u64::from(bytes);
                let (mut written, mut count) = ([0u64; 32], 0);
                for lane in lanes(active) {
                    let to = warp.get(inst.src[0], lane).wrapping_add(dst_offset as u64);
                    (written[count], count) = (to, count + 1);
                    let from = warp.get(inst.src[1], lane).wrapping_add(src_offset as u64);
                    if (to | from) & (n - 1) != 0 {
                        return Err(misaligned("cp.async", if to & (n - 1) != 0 { to } else { from }, n));
                    }
                    let take = match inst.src[2].file() {
                        None => n,
                        Some(crate::op::File::Pred) => {
                            if warp.p[inst.src[2].row()] >> lane & 1 != 0 {
                                0
                            } else {
                                n
                            }
                        }
                        Some(_) => warp.get(inst.src[2], lane),
                    };
                    if take > n {
                        return Err(fault(
                            FaultKind::OutOfBounds,
                            format!("cp.async src-size {take} beyond {n}"),
                        ));
                    }
                    let mut data = [0u8; 16];
                    if take > 0 {
                        self.read(warp, Target::Global(from), &mut data[..take as usize], lane, false)?;
                    }
                    let (cta, at) = self.own_target(warp, to)?;
                    let shared = &mut self.blocks[cta as usize].shared;
                    shared.check(at, n as u32, n as u32, "cp.async destination")?;
                    if let Some(seed) = self.launch.options.garbage {
                        let epoch = warp.asynchrony.copy_epoch + 1;
                        let copy = PendingCopy { epoch, cta, at, bytes: n as u32, data };
                        warp.asynchrony.copies.push_back(copy);
                        for (word, data) in data.chunks_exact_mut(4).enumerate() {
                            let garbage = crate::garbage::word(seed, u64::from(at) + 4 * word as u64);
                            data.copy_from_slice(&garbage.to_le_bytes());
                        }
                    }
                    shared.get_mut(at, n as u32).copy_from_slice(&data[..n as usize]);
                    if let Some(t) = &mut self.tracker {
                        t.copy_write(warp, cta, at, n as u32, lane)?;
                    }
                }
                self.counters.bulk_bytes += n * u64::from(active.count_ones());
                let (passes, ideal) = bank_waves(&written[..count], n);
                self.counters.bank_conflicts += passes.saturating_sub(ideal);
            }
            Code::CpAsyncCommit => {
                let a = &mut warp.asynchrony;
                a.copy_epoch += 1;
                a.copy_groups.push_back(a.copy_epoch);
            }
            Code::CpAsyncWait { all } => {
                let n = warp.w[inst.src[0].row()][0];
                let a = &mut warp.asynchrony;
                if all {
                    a.copy_epoch += 1;
                    a.copy_groups.clear();
                    a.copy_done = a.copy_epoch;
                }
                while a.copy_groups.len() > n as usize {
                    a.copy_done = a.copy_groups.pop_front().unwrap_or(a.copy_done);
                }
                self.land_copies(warp, warp.asynchrony.copy_done);
                if let Some(t) = &mut self.tracker {
                    t.copies_done(warp);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Writes what copies up to `epoch` bring, where garbage stood in their place.
    pub(super) fn land_copies(&mut self, warp: &mut Warp, epoch: u32) {
        let copies = &mut warp.asynchrony.copies;
        while copies.front().is_some_and(|copy| copy.epoch <= epoch) {
            let Some(copy) = copies.pop_front() else { break };
            let to = self.blocks[copy.cta as usize].shared.get_mut(copy.at, copy.bytes);
            to.copy_from_slice(&copy.data[..copy.bytes as usize]);
        }
    }

    /// The tensor map that a generic or parameter address names.
    fn tensor_map(&mut self, warp: &mut Warp, address: u64, lane: usize) -> Exec<TensorMap> {
        if address & 63 != 0 {
            return Err(misaligned("tensor map", address, 64));
        }
        let mut bytes = [0u8; 128];
        // NVRTC hands over the bare parameter address where the parameter lives in its own space.
        let space = if address < 1 << 16 { Space::Param } else { Space::Generic };
        let target = self.resolve(warp, space, address)?;
        self.read(warp, target, &mut bytes, lane, true)?;
        TensorMap::decode(&bytes).map_err(Box::new)
    }

    pub(super) fn bulk(
        &mut self,
        warp: &mut Warp,
        program: &Program,
        inst: &Inst,
        bulk: Bulk,
        active: u32,
    ) -> Exec<()> {
        let list = program.list(inst).1;
        for lane in lanes(active) {
            let value = |i: usize| if list[i].is_some() { warp.get(list[i], lane) } else { 0 };
            let dst = value(0).wrapping_add(bulk.dst_offset as u64);
            let src = value(1).wrapping_add(bulk.src_offset as u64);
            let bar = value(2).wrapping_add(bulk.bar_offset as u64);
            let (bytes, mask) = (value(3) as u32, value(4) as u32);
            let mut coords = [0i32; 5];
            for (i, reg) in list[5..].iter().enumerate() {
                coords[i] = warp.get(*reg, lane) as u32 as i32;
            }
            let is_store = bulk.route == Route::RegistersToCluster;
            let bytes = if is_store { 4 * (list.len() - 5) as u32 } else { bytes };
            let mut job = Job {
                bulk,
                map: None,
                coords,
                global: 0,
                source: (0, 0),
                bytes,
                shared: Vec::new(),
                bars: Vec::new(),
                cta: warp.cta,
                warp: warp.index,
                lane,
                pc: self.pc_of(warp),
                group: warp.asynchrony.bulk_committed + 1,
                clocks: self.tracker.as_ref().map(|t| t.snapshot(warp)).unwrap_or_default(),
                taken: None,
            };
            if bulk.dims > 0 {
                let at = if bulk.route == Route::SharedToGlobal { dst } else { src };
                let map = self.tensor_map(warp, at, lane)?;
                map.validate().map_err(Box::new)?;
                // The driver's rules for maps do not say so: an H200 ends in an illegal instruction.
                let first = i64::from(coords[0]) * i64::from(map.element_bytes());
                if first % 16 != 0 {
                    let text = format!("a box that begins {first} bytes into a row, no multiple of 16");
                    return Err(Fault::new(FaultKind::Misaligned, text).into());
                }
                if map.rank != bulk.dims {
                    let text = format!("a {}-dimensional copy with a map of rank {}", bulk.dims, map.rank);
                    return Err(fault(FaultKind::Descriptor, text));
                }
                if bulk.four_rows && map.box_dims[1] != 1 {
                    let text = format!("tile::gather4 with a box of {} rows, not one", map.box_dims[1]);
                    return Err(fault(FaultKind::Descriptor, text));
                }
                job.bytes = map.box_bytes() * if bulk.four_rows { 4 } else { 1 };
                job.map = Some(map);
            } else if !is_store && (bytes % 16 != 0 || bytes == 0) {
                return Err(fault(
                    FaultKind::Descriptor,
                    format!("bulk copy of {bytes} bytes, no multiple of 16"),
                ));
            }
            let reach = |address| {
                if bulk.own { self.own_target(warp, address) } else { self.cluster_target(address) }
            };
            match bulk.route {
                Route::Prefetch => continue,
                Route::GlobalToShared => {
                    job.global = src;
                    job.shared.push(reach(dst)?);
                }
                Route::SharedToGlobal => {
                    job.global = dst;
                    job.source = self.own_target(warp, src)?;
                }
                Route::RegistersToCluster => job.shared.push(reach(dst)?),
                Route::SharedToCluster => {
                    job.source = self.own_target(warp, src)?;
                    job.shared.push(reach(dst)?);
                }
            }
            if bulk.completion == Completion::Mbarrier {
                job.bars.push(reach(bar)?);
            }
            if bulk.multicast {
                self.multicast(&mut job, mask)?;
            }
            if !is_store && bulk.route != Route::SharedToCluster {
                warp.is_after_grids(lane, "bulk copy")?;
            }
            self.check_job(&job)?;
            if bulk.completion == Completion::BulkGroup {
                warp.asynchrony.bulk_open += 1;
            }
            self.counters.bulk_bytes += u64::from(job.bytes) * job.shared.len().max(1) as u64;
            self.counters.bulk_copies += 1;
            self.events += 1;
            if self.is_late() {
                self.pending.push(job);
            } else {
                self.complete(&job)?;
            }
        }
        Ok(())
    }

    pub(super) fn pc_of(&self, warp: &Warp) -> u32 {
        warp.current_pc
    }

    /// Copies to the same offsets in every block of the mask.
    fn multicast(&self, job: &mut Job, mask: u32) -> Exec<()> {
        let (_, at) = job.shared[0];
        let bar = job.bars.first().map(|b| b.1);
        (job.shared, job.bars) = (Vec::new(), Vec::new());
        for cta in (0..16).filter(|r| mask >> r & 1 != 0) {
            if cta as usize >= self.blocks.len() {
                let text =
                    format!("multicast mask {mask:#x} names rank {cta} of {} blocks", self.blocks.len());
                return Err(fault(FaultKind::OutOfBounds, text));
            }
            job.shared.push((cta, at));
            job.bars.extend(bar.map(|b| (cta, b)));
        }
        Ok(())
    }

    fn check_job(&self, job: &Job) -> Exec<()> {
        let align = match &job.map {
            // The pattern repeats over eight rows of the span; a plain tile needs 128 bytes.
            Some(_) => 128,
            None if job.bulk.route == Route::RegistersToCluster => job.bytes,
            None => 16,
        };
        let end = if job.bulk.route == Route::SharedToGlobal { Some(job.source) } else { None };
        for &(cta, at) in job.shared.iter().chain(end.iter()) {
            self.blocks[cta as usize].shared.check(at, job.bytes, align, "bulk copy in shared memory")?;
        }
        if job.map.is_none() && !job.global.is_multiple_of(16) {
            return Err(misaligned("bulk copy in global memory", job.global, 16));
        }
        Ok(())
    }

    /// Carries out an asynchronous copy and announces it.
    pub(super) fn complete(&mut self, job: &Job) -> Exec<()> {
        self.carry_out(job).map_err(|f| self.placed_job(f, job))
    }

    /// Reads what a store from shared memory will write.
    fn take_source(&mut self, job: &mut Job) -> Exec<()> {
        let mut data = vec![0; job.bytes as usize];
        self.collect(job, &mut data).map_err(|f| self.placed_job(f, job))?;
        job.taken = Some(data);
        Ok(())
    }

    fn placed_job(&self, mut f: Box<Fault>, job: &Job) -> Box<Fault> {
        let (line, source) = self.launch.program.lines[job.pc as usize];
        *f = f.at(line, source);
        let block = self.blocks[job.cta as usize].index;
        f.place.get_or_insert(crate::fault::Place { block, warp: job.warp, lanes: 1 << job.lane });
        f
    }

    pub(super) fn bulk_group(&mut self, warp: &mut Warp, inst: &Inst) -> Exec<Step> {
        match inst.code {
            Code::BulkCommit => {
                warp.asynchrony.bulk_open = 0;
                warp.asynchrony.bulk_committed += 1;
            }
            Code::BulkWait { read } => {
                let n = warp.w[inst.src[0].row()][0];
                let upto = warp.asynchrony.bulk_committed.saturating_sub(n);
                // A wait makes the copies happen in late mode; a wait for reads leaves their writes for
                // later.
                while let Some(i) = self.pending.iter().position(|j| {
                    j.bulk.completion == Completion::BulkGroup
                        && (j.cta, j.warp) == (warp.cta, warp.index)
                        && j.group <= upto
                        && !(read && j.taken.is_some())
                }) {
                    let mut job = self.pending.swap_remove(i);
                    if read {
                        self.take_source(&mut job)?;
                        self.pending.push(job);
                    } else {
                        self.complete(&job)?;
                    }
                }
                let a = &mut warp.asynchrony;
                a.bulk_read = a.bulk_read.max(upto);
                if !read {
                    a.bulk_done = a.bulk_done.max(upto);
                }
                if let Some(t) = &mut self.tracker {
                    t.bulk_done(warp);
                }
            }
            _ => return Ok(Step::Block(Wait::Async("bulk group"))),
        }
        Ok(Step::Next)
    }

    pub(super) fn tensormap_replace(&mut self, warp: &mut Warp, inst: &Inst, active: u32) -> Exec<()> {
        let Code::TensorMapReplace { field, dim, offset, .. } = inst.code else { return Ok(()) };
        for lane in lanes(active) {
            let address = warp.get(inst.src[0], lane).wrapping_add(offset as u64);
            let value = warp.get(inst.src[1], lane);
            let target = self.resolve(warp, Space::Generic, address)?;
            let mut bytes = [0u8; 128];
            self.read(warp, target, &mut bytes, lane, true)?;
            let mut map = TensorMap::decode(&bytes).map_err(Box::new)?;
            if !map.replace(field, dim, value) {
                return Err(out_of_bounds("tensormap.replace", address, 128, "no such field or dimension"));
            }
            self.write(warp, target, &map.encode(), lane, true)?;
        }
        Ok(())
    }
}
