//! Asynchronous copies: `cp.async`, `cp.async.bulk`, its tensor and reducing forms. PTX ISA 9.7.9.25.

use super::cluster::{Cluster, Step};
use super::ldst::{Target, combine};
use super::tensor::TensorMap;
use super::warp::{Wait, Warp, lanes};
use super::{Exec, fault};
use crate::ast::{Space, Ty};
use crate::fault::{Fault, FaultKind};
use crate::hb::Clocks;
use crate::memory::{misaligned, out_of_bounds, uninitialised};
use crate::op::{AtomOp, Bulk, Code, Completion, Inst, Program, Route};

/// One asynchronous operation, its operands evaluated.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    bulk: Bulk,
    map: Option<TensorMap>,
    coords: [i32; 5],
    /// Global address, or source in shared memory for block-to-block copies.
    global: u64,
    source: (u32, u32),
    bytes: u32,
    /// Block and offset of each copy in shared memory, and of the barrier it completes on.
    shared: Vec<(u32, u32)>,
    bars: Vec<(u32, u32)>,
    /// Who issued it, for reports and bulk groups.
    pub(super) cta: u32,
    pub(super) warp: u32,
    pub(super) lane: usize,
    pub(super) pc: u32,
    pub(super) group: u32,
    pub(super) clocks: Clocks,
}

impl Cluster {
    pub(super) fn copy_async(&mut self, warp: &mut Warp, inst: &Inst, active: u32) -> Exec<()> {
        match inst.code {
            Code::CpAsync { bytes, dst_offset, src_offset } => {
                let n = u64::from(bytes);
                for lane in lanes(active) {
                    let to = warp.get(inst.src[0], lane).wrapping_add(dst_offset as u64);
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
                    shared.get_mut(at, n as u32).copy_from_slice(&data[..n as usize]);
                    if let Some(t) = &mut self.tracker {
                        t.copy_write(warp, cta, at, n as u32, lane)?;
                    }
                }
                self.counters.bulk_bytes += n * u64::from(active.count_ones());
            }
            Code::CpAsyncCommit => warp.asynchrony.copy_committed += 1,
            Code::CpAsyncWait { all } => {
                let n = warp.w[inst.src[0].row()][0];
                let a = &mut warp.asynchrony;
                if all {
                    a.copy_committed += 1;
                    a.copy_done = a.copy_committed;
                } else {
                    a.copy_done = a.copy_done.max(a.copy_committed.saturating_sub(n));
                }
                if let Some(t) = &mut self.tracker {
                    t.copies_done(warp);
                }
            }
            _ => {}
        }
        Ok(())
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
            };
            if bulk.dims > 0 {
                let at = if bulk.route == Route::SharedToGlobal { dst } else { src };
                let map = self.tensor_map(warp, at, lane)?;
                map.validate().map_err(Box::new)?;
                if map.rank != bulk.dims {
                    let text = format!("a {}-dimensional copy with a map of rank {}", bulk.dims, map.rank);
                    return Err(fault(FaultKind::Descriptor, text));
                }
                job.bytes = map.box_bytes();
                job.map = Some(map);
            } else if bytes % 16 != 0 || bytes == 0 {
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

    /// The same offsets in every block of the mask.
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

    fn placed_job(&self, mut f: Box<Fault>, job: &Job) -> Box<Fault> {
        let (line, source) = self.launch.program.lines[job.pc as usize];
        *f = f.at(line, source);
        let block = self.blocks[job.cta as usize].index;
        f.place.get_or_insert(crate::fault::Place { block, warp: job.warp, lanes: 1 << job.lane });
        f
    }

    fn carry_out(&mut self, job: &Job) -> Exec<()> {
        let mut data = vec![0u8; job.bytes as usize];
        match job.bulk.route {
            Route::Prefetch => {}
            Route::GlobalToShared => {
                match &job.map {
                    Some(map) => self.gather(map, job.coords, &mut data)?,
                    None => {
                        let check = self.launch.options.check_uninitialised;
                        self.launch.view.read(job.global, &mut data, check)?;
                    }
                }
                self.counters.global_read += u64::from(job.bytes);
                self.deliver(job, &data)?;
            }
            Route::SharedToCluster => {
                self.collect(job, &mut data)?;
                self.deliver(job, &data)?;
            }
            Route::SharedToGlobal => {
                self.collect(job, &mut data)?;
                self.counters.global_written += u64::from(job.bytes);
                match &job.map {
                    Some(map) => self.scatter(map, job, &data)?,
                    None => self.store_row(job, job.global, &data)?,
                }
            }
        }
        Ok(())
    }

    /// Writes the tile into shared memory, swizzled, and completes the bytes on the barrier.
    fn deliver(&mut self, job: &Job, data: &[u8]) -> Exec<()> {
        let swizzle = job.map.as_ref().map(TensorMap::swizzle_mode);
        for (i, &(cta, at)) in job.shared.iter().enumerate() {
            let bar = job.bars.get(i).copied();
            let epoch = match bar {
                Some((c, a)) => {
                    let bar = self.barrier_at(c, a)?;
                    (bar.track, bar.phase as u32 + 1)
                }
                None => (0, 0),
            };
            if let Some(t) = &mut self.tracker {
                if let Some((c, a)) = bar {
                    t.async_barrier(c, a)?;
                }
                t.async_write(&job.clocks, epoch, job.pc, job.lane, cta, at, job.bytes)?;
            }
            let shared = &mut self.blocks[cta as usize].shared;
            match (job.bulk.reduce, swizzle) {
                (Some((op, ty)), _) => {
                    shared.check_written(at, job.bytes, "reduction into shared memory")?;
                    let mut old = shared.get(at, job.bytes).to_vec();
                    reduce(op, ty, &mut old, data);
                    shared.get_mut(at, job.bytes).copy_from_slice(&old);
                }
                (None, Some(swizzle)) => {
                    let all = shared.get_mut(at, job.bytes);
                    for (n, chunk) in data.chunks_exact(16).enumerate() {
                        let to = (swizzle.apply(at + 16 * n as u32) - at) as usize;
                        all[to..to + 16].copy_from_slice(chunk);
                    }
                    shared.note_swizzle(at, job.bytes, swizzle);
                }
                (None, None) => shared.get_mut(at, job.bytes).copy_from_slice(data),
            }
            if let Some((c, a)) = bar {
                self.complete_bytes(c, a, job.bytes)?;
            }
        }
        Ok(())
    }

    /// Reads the source in shared memory, undoing the swizzle.
    fn collect(&mut self, job: &Job, data: &mut [u8]) -> Exec<()> {
        let (cta, at) = job.source;
        if let Some(t) = &mut self.tracker {
            let track = t.bulk_track(job.cta, job.warp);
            t.async_read(&job.clocks, (track, job.group), job.pc, job.lane, cta, at, job.bytes)?;
        }
        let shared = &self.blocks[cta as usize].shared;
        shared.check_written(at, job.bytes, "bulk copy from shared memory")?;
        let all = shared.get(at, job.bytes);
        match job.map.as_ref().map(TensorMap::swizzle_mode) {
            Some(swizzle) => {
                for (n, chunk) in data.chunks_exact_mut(16).enumerate() {
                    let from = (swizzle.apply(at + 16 * n as u32) - at) as usize;
                    chunk.copy_from_slice(&all[from..from + 16]);
                }
            }
            None => data.copy_from_slice(all),
        }
        Ok(())
    }

    /// Calls `f` for each row of the box: offset in the tile, global address of the row's first element (as if
    /// in range), and whether every outer coordinate is in range.
    fn rows(map: &TensorMap, coords: [i32; 5], mut f: impl FnMut(usize, i64, bool) -> Exec<()>) -> Exec<()> {
        let rank = usize::from(map.rank);
        let row = (map.box_elements(0) * map.element_bytes()) as usize;
        let counts: [u32; 5] =
            std::array::from_fn(|i| if i > 0 && i < rank { map.box_elements(i) } else { 1 });
        for n in 0..counts.iter().product::<u32>() {
            let (mut rest, mut address, mut inside) = (n, map.address as i64, true);
            for i in 1..rank {
                let c = i64::from(coords[i]) + i64::from(rest % counts[i] * map.element_strides[i]);
                rest /= counts[i];
                inside &= c >= 0 && (c as u64) < map.dims[i];
                address += c * map.strides[i - 1] as i64;
            }
            f(n as usize * row, address, inside)?;
        }
        Ok(())
    }

    /// Reads a box; elements outside the tensor become zero (or NaN).
    fn gather(&mut self, map: &TensorMap, coords: [i32; 5], data: &mut [u8]) -> Exec<()> {
        let size = map.element_bytes() as usize;
        let fill: &[u8] = match (map.nan_fill, map.data_type) {
            (false, _) => &[0; 8],
            (true, 6 | 9) => &[0xff, 0x7f],
            (true, _) => &[0xff, 0xff, 0xff, 0x7f],
        };
        let step = i64::from(map.element_strides[0]);
        let count = map.box_elements(0) as usize;
        let view = &self.launch.view;
        let check = self.launch.options.check_uninitialised;
        Self::rows(map, coords, |at, address, inside| {
            let out = &mut data[at..at + count * size];
            let first = i64::from(coords[0]);
            if inside && step == 1 {
                let from = first.clamp(0, map.dims[0] as i64);
                let to = (first + count as i64).clamp(0, map.dims[0] as i64);
                let (skip, n) = ((from - first).clamp(0, count as i64) as usize, (to - from).max(0) as usize);
                fill_with(&mut out[..skip * size], fill);
                fill_with(&mut out[(skip + n) * size..], fill);
                if n > 0 {
                    let source = (address + from * size as i64) as u64;
                    view.read(source, &mut out[skip * size..(skip + n) * size], check)?;
                }
                return Ok(());
            }
            for i in 0..count {
                let c = first + i as i64 * step;
                let cell = &mut out[i * size..(i + 1) * size];
                if inside && c >= 0 && (c as u64) < map.dims[0] {
                    view.read((address + c * size as i64) as u64, cell, check)?;
                } else {
                    fill_with(cell, fill);
                }
            }
            Ok(())
        })
    }

    /// Writes a box; elements outside the tensor are dropped.
    fn scatter(&mut self, map: &TensorMap, job: &Job, data: &[u8]) -> Exec<()> {
        let size = map.element_bytes() as usize;
        let count = map.box_elements(0) as usize;
        let step = i64::from(map.element_strides[0]);
        let mut spans: Vec<(u64, usize, usize)> = Vec::new();
        Self::rows(map, job.coords, |at, address, inside| {
            let first = i64::from(job.coords[0]);
            if !inside {
                return Ok(());
            }
            if step == 1 {
                let from = first.clamp(0, map.dims[0] as i64);
                let to = (first + count as i64).clamp(from, map.dims[0] as i64);
                let skip = (from - first).clamp(0, count as i64) as usize;
                spans.push((
                    (address + from * size as i64) as u64,
                    at + skip * size,
                    (to - from) as usize * size,
                ));
            } else {
                for i in 0..count {
                    let c = first + i as i64 * step;
                    if c >= 0 && (c as u64) < map.dims[0] {
                        spans.push(((address + c * size as i64) as u64, at + i * size, size));
                    }
                }
            }
            Ok(())
        })?;
        for (address, at, n) in spans {
            if n > 0 {
                self.store_row(job, address, &data[at..at + n])?;
            }
        }
        Ok(())
    }

    /// Writes or reduces contiguous bytes of global memory.
    fn store_row(&mut self, job: &Job, address: u64, data: &[u8]) -> Exec<()> {
        use std::sync::atomic::Ordering::Relaxed;
        self.launch.global_events.fetch_add(1, Relaxed);
        let Some((op, ty)) = job.bulk.reduce else { return self.launch.view.write(address, data) };
        let ty = match &job.map {
            Some(map) => map_type(map.data_type),
            None => ty,
        };
        let a = self.launch.view.find(address, data.len() as u64, &mut self.hint, "bulk reduction")?;
        let at = address - a.base;
        if let Some(first) = a.first_unwritten(at, data.len() as u64) {
            return Err(uninitialised("bulk reduction into global memory", a.base + first));
        }
        if !at.is_multiple_of(4) || !data.len().is_multiple_of(4) || ty.bytes() == 8 {
            let launch = std::sync::Arc::clone(&self.launch);
            let _guard = launch.wide_atomics.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let mut old = vec![0u8; data.len()];
            a.read(at, &mut old);
            reduce(op, ty, &mut old, data);
            a.write(at, &old);
            return Ok(());
        }
        for (i, word) in data.chunks_exact(4).enumerate() {
            let cell = a.word(at + 4 * i as u64);
            let _ = cell.fetch_update(Relaxed, Relaxed, |old| {
                let mut bytes = old.to_le_bytes();
                reduce(op, ty, &mut bytes, word);
                Some(u32::from_le_bytes(bytes))
            });
        }
        Ok(())
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
                // In late mode this wait is what makes the copies happen.
                while let Some(i) = self.pending.iter().position(|j| {
                    j.bulk.completion == Completion::BulkGroup
                        && (j.cta, j.warp) == (warp.cta, warp.index)
                        && j.group <= upto
                }) {
                    let job = self.pending.swap_remove(i);
                    self.complete(&job)?;
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

fn fill_with(out: &mut [u8], pattern: &[u8]) {
    for (i, b) in out.iter_mut().enumerate() {
        *b = pattern[i % pattern.len()];
    }
}

fn map_type(data_type: u8) -> Ty {
    match data_type {
        0 => Ty::U8,
        1 => Ty::U16,
        3 => Ty::S32,
        4 => Ty::U64,
        5 => Ty::S64,
        6 => Ty::F16,
        7 | 10 => Ty::F32,
        8 => Ty::F64,
        9 => Ty::Bf16,
        _ => Ty::U32,
    }
}

/// `old = old op data`, element by element.
fn reduce(op: AtomOp, ty: Ty, old: &mut [u8], data: &[u8]) {
    let size = (ty.bytes() as usize).max(1);
    for (o, d) in old.chunks_exact_mut(size).zip(data.chunks_exact(size)) {
        let word = |b: &[u8]| b.iter().rev().fold(0u64, |v, &b| v << 8 | u64::from(b));
        let r = combine(op, ty, word(o), word(d), 0).to_le_bytes();
        o.copy_from_slice(&r[..size]);
    }
}
