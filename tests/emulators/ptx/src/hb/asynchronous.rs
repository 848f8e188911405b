//! Accesses of operations that complete later: copies, `tcgen05`, and the tensor memory that they share with warps.

use super::{Access, Clocks, Exec, SeenReads, Touch, Tracker};
use crate::exec::Warp;

impl Tracker {
    /// A `cp.async` by a warp, complete when its group is waited for, or for a thread that sees the phase of
    /// an mbarrier that counts it.
    pub(crate) fn copy_write(&mut self, warp: &Warp, cta: u32, at: u32, n: u32, lane: usize) -> Exec<()> {
        let id = self.id(warp);
        let me = (self.copy_track(id), warp.asynchrony.copy_epoch + 1, warp.current_pc, lane);
        self.at_the_time_of(id, |t, clocks| t.touch(Touch::Write, clocks, me, [cta, at, n]))
    }

    /// `cp.async.mbarrier.arrive`: a thread that sees the barrier's phase sees the warp's copies so far
    /// complete.
    pub(crate) fn copies_release(&self, warp: &Warp, into: &mut Clocks) {
        let track = self.copy_track(self.id(warp)) as usize;
        if into.v.len() <= track {
            into.v.resize(track + 1, 0);
        }
        into.v[track] = into.v[track].max(warp.asynchrony.copy_epoch);
    }

    /// A `tcgen05` operation is issued: its clocks, ordered after the warp's earlier ones.
    pub(crate) fn tcgen_issue(&mut self, warp: &mut Warp) -> Clocks {
        warp.asynchrony.tcgen_issued += 1;
        let mut clocks = self.snapshot(warp);
        let track = self.tcgen_track(warp);
        if clocks.v.len() <= track as usize {
            clocks.v.resize(track as usize + 1, 0);
        }
        clocks.v[track as usize] = warp.asynchrony.tcgen_issued;
        clocks
    }

    pub(super) fn tcgen_track(&self, warp: &Warp) -> u32 {
        5 * self.warps + self.id(warp)
    }

    /// A commit: a thread that sees the barrier's phase sees the warp's `tcgen05` operations complete.
    pub(crate) fn tcgen_release(&mut self, warp: &Warp, into: &mut Clocks) {
        let id = self.id(warp) as usize;
        let track = self.tcgen_track(warp) as usize;
        into.join(&self.clocks[id]);
        if into.v.len() <= track {
            into.v.resize(track + 1, 0);
        }
        into.v[track] = into.v[track].max(warp.asynchrony.tcgen_issued);
        self.begin_epoch(id);
    }

    /// A `tcgen05` operation reads 16 bytes of shared memory.
    pub(crate) fn tcgen_read_shared(&mut self, warp: &Warp, clocks: &Clocks, cta: u32, at: u32) -> Exec<()> {
        let me = (self.tcgen_track(warp), warp.asynchrony.tcgen_issued, warp.current_pc, 0);
        self.touch(Touch::Read, clocks, me, [cta, at, 16])
    }

    /// Tensor memory as the cells behind those of all blocks' shared memory: of `columns` columns in a
    /// quadrant of lanes.
    pub(super) fn tmem_cells(&self, cta: u32, [quadrant, column, columns]: [u32; 3]) -> [u32; 3] {
        [self.blocks + cta, (quadrant * 512 + column) * 4, columns * 4]
    }

    /// A `tcgen05` operation reads or writes tensor memory: quadrant of lanes, first column, columns.
    pub(crate) fn tcgen_tmem(
        &mut self,
        touch: Touch,
        warp: &Warp,
        clocks: &Clocks,
        cta: u32,
        part: [u32; 3],
    ) -> Exec<()> {
        let me = (self.tcgen_track(warp), warp.asynchrony.tcgen_issued, warp.current_pc, 0);
        let cells = self.tmem_cells(cta, part);
        if self.strict_tensor_memory {
            return self.touch(touch, &self.tensor_clocks(warp, clocks), me, cells);
        }
        self.touch(touch, clocks, me, cells)
    }

    /// `tcgen05.ld` or `.st` by a warp, of the same part, ordered like an access to shared memory.
    pub(super) fn tmem_access(&mut self, touch: Touch, warp: &Warp, part: [u32; 3]) -> Exec<()> {
        self.generic(touch, warp, self.tmem_cells(warp.cta, part), 0, false)
    }

    /// Whether `me`, a track and epoch, has recorded its reads of these bytes and all their writes are ordered before
    /// `clocks` too. If not, the reads are to be recorded one by one, which finds the race.
    pub(crate) fn read_before(&self, clocks: &Clocks, me: (u32, u32), cta: u32, seen: &SeenReads) -> bool {
        seen.readers.contains(&me)
            && seen.writes.iter().all(|w| {
                self.ordered(*w, &clocks.v) && self.check_proxy(*w, clocks, me.0, "read", cta, 0).is_ok()
            })
    }

    /// Notes that `me` has recorded its reads of the 16-byte chunks at `chunks`.
    pub(crate) fn note_reads(&mut self, me: (u32, u32), cta: u32, chunks: &[u32], seen: &mut SeenReads) {
        if seen.readers.is_empty() {
            for &at in chunks {
                for write in self.line(cta, at as usize / 16).writes() {
                    let same = |w: &Access| (w.track(), w.epoch()) == (write.track(), write.epoch());
                    if write.is_some()
                        && !seen.writes.last().is_some_and(same)
                        && !seen.writes.iter().any(same)
                    {
                        seen.writes.push(write);
                    }
                }
            }
        }
        // Few are still to come for the same product; the newest suffice.
        if seen.readers.len() == 4 {
            seen.readers.remove(0);
        }
        seen.readers.push(me);
    }
}
