//! Data that asynchronous copies move: tiles of tensors in and out, reductions on the way.

use super::Exec;
use super::atomic::combine;
use super::bulk::Job;
use super::cluster::Cluster;
use super::tensor::TensorMap;
use crate::ast::Ty;
use crate::hb::Touch;
use crate::memory::uninitialised;
use crate::op::{AtomOp, Route};

impl Cluster {
    pub(super) fn carry_out(&mut self, job: &Job) -> Exec<()> {
        // One buffer serves every job; whatever it held, all of it is written.
        let mut data = std::mem::take(&mut self.moved);
        data.resize(job.bytes as usize, 0);
        let result = self.carry(job, &mut data);
        self.moved = data;
        result
    }

    fn carry(&mut self, job: &Job, data: &mut [u8]) -> Exec<()> {
        match job.bulk.route {
            Route::Prefetch => {}
            Route::GlobalToShared => {
                match &job.map {
                    Some(map) if job.bulk.four_rows => {
                        let [column, rows @ ..] = job.coords;
                        for (row, data) in rows.into_iter().zip(data.chunks_exact_mut(job.bytes as usize / 4))
                        {
                            self.gather(map, [column, row, 0, 0, 0], data)?;
                        }
                    }
                    Some(map) => self.gather(map, job.coords, data)?,
                    None => {
                        let check = self.launch.options.check_uninitialised;
                        self.launch.view.read(job.global, data, check)?;
                    }
                }
                self.counters.global_read += u64::from(job.bytes);
                self.deliver(job, data)?;
            }
            Route::RegistersToCluster => {
                for (to, word) in data.chunks_exact_mut(4).zip(job.coords) {
                    to.copy_from_slice(&word.to_le_bytes());
                }
                self.deliver(job, data)?;
            }
            Route::SharedToCluster => {
                self.collect(job, data)?;
                self.deliver(job, data)?;
            }
            Route::SharedToGlobal => {
                match &job.taken {
                    Some(taken) => data.copy_from_slice(taken),
                    None => self.collect(job, data)?,
                }
                self.counters.global_written += u64::from(job.bytes);
                match &job.map {
                    Some(map) => self.scatter(map, job, data)?,
                    None => self.store_row(job, job.global, data)?,
                }
            }
        }
        Ok(())
    }

    /// The track of an mbarrier, and which of its phases is the next to complete.
    fn phase_at_work(&mut self, cta: u32, at: u32) -> Exec<(u32, u32)> {
        let bar = self.barrier_at(cta, at)?;
        Ok((bar.track, bar.phase as u32 + 1))
    }

    /// Writes the tile into shared memory, swizzled, and completes the bytes on the barrier.
    pub(super) fn deliver(&mut self, job: &Job, data: &[u8]) -> Exec<()> {
        let swizzle = job.map.as_ref().map(TensorMap::swizzle_mode);
        for (i, &(cta, at)) in job.shared.iter().enumerate() {
            let bar = job.bars.get(i).copied();
            let epoch = match bar {
                Some((c, a)) => self.phase_at_work(c, a)?,
                None => (0, 0),
            };
            if let Some(t) = &mut self.tracker {
                if let Some((c, a)) = bar {
                    t.async_barrier(c, a)?;
                }
                let me = (epoch.0, epoch.1, job.pc, job.lane);
                t.touch(Touch::Write, &job.clocks, me, [cta, at, job.bytes])?;
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
    pub(super) fn collect(&mut self, job: &Job, data: &mut [u8]) -> Exec<()> {
        let (cta, at) = job.source;
        // PTX ISA, `cp.async.bulk`: an mbarrier that counts the bytes says too that they have been read.
        let announced = match job.bars.first() {
            Some(&(c, a)) => Some(self.phase_at_work(c, a)?),
            None => None,
        };
        if let Some(t) = &mut self.tracker {
            let (track, epoch) = announced.unwrap_or_else(|| (t.bulk_track(job.cta, job.warp), job.group));
            let me = (track, epoch, job.pc, job.lane);
            t.touch(Touch::Read, &job.clocks, me, [cta, at, job.bytes])?;
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
    pub(super) fn rows(
        map: &TensorMap,
        coords: [i32; 5],
        mut f: impl FnMut(usize, i64, bool) -> Exec<()>,
    ) -> Exec<()> {
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
    pub(super) fn gather(&mut self, map: &TensorMap, coords: [i32; 5], data: &mut [u8]) -> Exec<()> {
        let size = map.element_bytes() as usize;
        let fill: &[u8] = match (map.nan_fill, map.data_type) {
            (false, _) => &[0; 8],
            (true, 6 | 9) => &[0xff, 0x7f],
            (true, _) => &[0xff, 0xff, 0xff, 0x7f],
        };
        let step = i64::from(map.element_strides[0]);
        let count = map.box_elements(0) as usize;
        let (view, hint) = (&self.launch.view, &mut self.hint);
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
                    view.read_near(source, &mut out[skip * size..(skip + n) * size], check, hint)?;
                }
                return Ok(());
            }
            for i in 0..count {
                let c = first + i as i64 * step;
                let cell = &mut out[i * size..(i + 1) * size];
                if inside && c >= 0 && (c as u64) < map.dims[0] {
                    view.read_near((address + c * size as i64) as u64, cell, check, hint)?;
                } else {
                    fill_with(cell, fill);
                }
            }
            Ok(())
        })
    }

    /// Writes a box; elements outside the tensor are dropped.
    pub(super) fn scatter(&mut self, map: &TensorMap, job: &Job, data: &[u8]) -> Exec<()> {
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
    pub(super) fn store_row(&mut self, job: &Job, address: u64, data: &[u8]) -> Exec<()> {
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
}

pub(super) fn fill_with(out: &mut [u8], pattern: &[u8]) {
    for (i, b) in out.iter_mut().enumerate() {
        *b = pattern[i % pattern.len()];
    }
}

pub(super) fn map_type(data_type: u8) -> Ty {
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
pub(super) fn reduce(op: AtomOp, ty: Ty, old: &mut [u8], data: &[u8]) {
    let size = (ty.bytes() as usize).max(1);
    for (o, d) in old.chunks_exact_mut(size).zip(data.chunks_exact(size)) {
        let word = |b: &[u8]| b.iter().rev().fold(0u64, |v, &b| v << 8 | u64::from(b));
        let r = combine(op, ty, word(o), word(d), 0).to_le_bytes();
        o.copy_from_slice(&r[..size]);
    }
}
