//! Times decode on the CPU backend in alternation with the machine's own read bandwidth: one query per
//! sequence over a long cache, whose K and V must be read once.
//!
//! `decode_bench SEQLEN_K BATCH HEADS_Q HEADS_KV HEAD_DIM TYPE PAGE_SIZE(0: strided) TURNS`, where TYPE is f32, f16
//! or bf16, or two types: `bf16/fp8` is queries of bf16 over a cache of FP8. `FMHA_NUM_THREADS` and `FMHA_CPU_ISA`
//! apply to both. Plain reads use the same number of threads, with and without prefetch. Tensors begin on a cache
//! line, as PyTorch's do. With AVX-512 a third measurement reads whole lines in the order of the cache: for pages
//! in the order of the block table, with and without prefetch of lines of later pages. Prints the best of each over
//! the repetitions, and the ratios, by the clock. With one thread it also prints processor time, which other
//! programs do not lengthen.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::Instant;

use fmha_core::{
    BlockTable, DType, DevSlice, DevSliceMut, Device, Dims, FwdArgs, FwdProblem, KvLayout, PlanOptions,
    QLayout,
};
use fmha_cpu::CpuBackend;

/// Cache line of 64 bytes.
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u64; 8]);

/// Processor time of this thread.
fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable; the call touches nothing else.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Seconds of some work, by the clock and by this thread's processor time.
fn timed(work: impl FnOnce()) -> (f64, f64) {
    let (start, start_cpu) = (Instant::now(), thread_seconds());
    work();
    (start.elapsed().as_secs_f64(), thread_seconds() - start_cpu)
}

/// Distance of the prefetch from the read, in lines.
const AHEAD_LINES: usize = 128;

fn prefetch(line: *const Line) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch faults nowhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
    }
    let _ = line;
}

/// Sums a part of the memory, with software prefetch or with the processor's own alone.
fn sum(part: &[Line], asks: bool) -> u64 {
    let mut sums = [0u64; 8];
    for line in part {
        if asks {
            prefetch(std::ptr::from_ref(line).wrapping_add(AHEAD_LINES));
        }
        for (sum, &x) in sums.iter_mut().zip(&line.0) {
            *sum = sum.wrapping_add(x);
        }
    }
    sums.iter().fold(0u64, |sum, &x| sum.wrapping_add(x))
}

/// Sums a part of the memory by whole cache lines into four sums; with `asks`, prefetches ahead. Its speed is the
/// limit of one core.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_of_whole_lines(part: &[Line], asks: bool) -> u64 {
    use std::arch::x86_64::{
        _mm512_add_epi64, _mm512_load_si512, _mm512_reduce_add_epi64, _mm512_setzero_si512,
    };
    const FOUR: usize = 4;
    let mut sums = [_mm512_setzero_si512(); FOUR];
    let (fours, rest) = part.as_chunks::<FOUR>();
    for four in fours {
        for (sum, line) in sums.iter_mut().zip(four) {
            let line = std::ptr::from_ref(line);
            if asks {
                prefetch(line.wrapping_add(AHEAD_LINES));
            }
            // SAFETY: a line, which is aligned.
            *sum = _mm512_add_epi64(*sum, unsafe { _mm512_load_si512(line.cast()) });
        }
    }
    let [a, b, c, d] = sums;
    let fours = _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d)));
    sum(rest, false).wrapping_add(fours.cast_unsigned())
}

/// [`sum`] by whole cache lines, if the processor has AVX-512.
fn sum_by_lines(part: &[Line], asks: bool) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has it.
        return unsafe { sum_of_whole_lines(part, asks) };
    }
    sum(part, asks)
}

/// A cache in pages: a range of the block table, and the number of lines of each page.
#[derive(Clone, Copy)]
struct Pages<'a>(&'a [i32], usize);

impl Pages<'_> {
    /// Sums the pages. Prefetches the first lines of a piece that lies some pieces ahead; the processor's own
    /// prefetcher then continues to the end of a 4 KiB page.
    fn sum(self, memory: &[Line], asks: bool) -> u64 {
        const PIECE_LINES: usize = 4096 / 64;
        const AHEAD_PIECES: usize = 4;
        const ASKED_LINES: usize = 8;
        let Self(pages, page_lines) = self;
        let piece_lines = page_lines.min(PIECE_LINES);
        let pieces_of_page = page_lines / piece_lines;
        let piece = |at: usize| {
            let (page, part) = (pages[at / pieces_of_page] as usize, at % pieces_of_page);
            let rest = if part + 1 == pieces_of_page { page_lines % piece_lines } else { 0 };
            &memory[page * page_lines + part * piece_lines..][..piece_lines + rest]
        };
        let pieces = pages.len() * pieces_of_page;
        let mut total = 0u64;
        for at in 0..pieces {
            let asked: &[Line] = if asks { piece((at + AHEAD_PIECES).min(pieces - 1)) } else { &[] };
            asked.iter().take(ASKED_LINES).for_each(|line| prefetch(line));
            total = total.wrapping_add(sum_by_lines(piece(at), false));
        }
        total
    }
}

/// Way in which memory is read, and whether lines are prefetched.
#[derive(Clone, Copy)]
enum Way {
    Plain { asks: bool },
    ByLines { asks: bool },
}

/// Threads that read memory on request, each a part of it.
struct Readers<'a> {
    memory: [&'a [Line]; 2],
    pages: Option<Pages<'a>>,
    threads: usize,
    way: Mutex<Way>,
    ends: AtomicBool,
    start: Barrier,
    done: Barrier,
}

impl<'a> Readers<'a> {
    fn new(memory: [&'a [Line]; 2], pages: Option<Pages<'a>>, threads: usize) -> Self {
        let (start, done) = (Barrier::new(threads), Barrier::new(threads));
        let way = Mutex::new(Way::Plain { asks: false });
        Self { memory, pages, threads, way, ends: AtomicBool::new(false), start, done }
    }

    fn read_part(&self, thread: usize) {
        let way = *self.way.lock().expect("no reader panics");
        let part = |len: usize| {
            let part = len.div_ceil(self.threads);
            (part * thread).min(len)..(part * (thread + 1)).min(len)
        };
        for memory in self.memory {
            let sum = match (way, self.pages) {
                (Way::Plain { asks }, _) => sum(&memory[part(memory.len())], asks),
                (Way::ByLines { asks }, None) => sum_by_lines(&memory[part(memory.len())], asks),
                (Way::ByLines { asks }, Some(Pages(pages, page_lines))) => {
                    Pages(&pages[part(pages.len())], page_lines).sum(memory, asks)
                }
            };
            std::hint::black_box(sum);
        }
    }

    /// Loop of every thread except the caller's.
    fn serve(&self, thread: usize) {
        loop {
            self.start.wait();
            if self.ends.load(Ordering::Relaxed) {
                return;
            }
            self.read_part(thread);
            self.done.wait();
        }
    }

    fn read(&self, way: Way) {
        *self.way.lock().expect("no reader panics") = way;
        self.start.wait();
        self.read_part(0);
        self.done.wait();
    }

    fn end(&self) {
        self.ends.store(true, Ordering::Relaxed);
        self.start.wait();
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: u32| args.get(i).map_or(Ok(default), |text| text.parse::<u32>());
    let (seqlen_k, batch) = (number(0, 32768)?, number(1, 1)?);
    let (num_heads_q, num_heads_kv, head_dim) = (number(2, 8)?, number(3, 8)?, number(4, 128)?);
    let types = args.get(5).map_or("bf16", String::as_str);
    let (dtype, dtype_cache) = types.split_once('/').unwrap_or((types, types));
    let (dtype, dtype_cache): (DType, DType) = (dtype.parse()?, dtype_cache.parse()?);
    let (page_size, turns) = (number(6, 0)?, number(7, 20)?);
    let dims = Dims::batch(batch).seqlens(1, seqlen_k).heads(num_heads_q, num_heads_kv).head_dim(head_dim);
    let layout = if page_size == 0 { KvLayout::Strided } else { KvLayout::Paged { page_size } };
    let mut problem = FwdProblem::new(QLayout::Batch, layout, dtype, dims);
    if dtype_cache != dtype {
        problem.cache.dtype = Some(dtype_cache);
    }
    let pages = if page_size == 0 { 0 } else { seqlen_k.div_ceil(page_size) };
    let rows = if page_size == 0 { batch * seqlen_k } else { batch * pages * page_size };
    let elems = rows as usize * num_heads_kv as usize * head_dim as usize;
    let cache_bytes = elems * dtype_cache.size_bytes() as usize;
    let mut state = 1u32;
    let mut random = |dtype: DType, elems: usize| {
        let size = dtype.size_bytes() as usize;
        let mut data = vec![Line([0; 8]); (elems * size).div_ceil(64)];
        let bytes = &mut bytemuck::cast_slice_mut::<Line, u8>(&mut data)[..elems * size];
        let (first, rest) = bytes.split_at_mut(bytes.len().min(1 << 20));
        for element in first.chunks_exact_mut(size) {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            dtype.write(f64::from(state >> 8) / f64::from(1 << 23) - 1.0, element);
        }
        // The other parts are copies of the first: random numbers for all of it would take longer than the
        // measurement.
        for part in rest.chunks_mut(first.len()) {
            part.copy_from_slice(&first[..part.len()]);
        }
        data
    };
    let q = random(dtype, problem.shape_q().num_elems() as usize);
    let (k, v) = (random(dtype_cache, elems), random(dtype_cache, elems));
    let mut o = q.clone();
    // Neighbouring pages of a sequence lie far apart, as in a server that has run for a while.
    let table: Vec<i32> =
        (0..batch * pages).map(|at| (u64::from(at) * 7919 % u64::from(batch * pages)) as i32).collect();

    let cpu = CpuBackend::new()?;
    let threads = cpu.threads();
    let backend = Device::new(cpu);
    let plan = backend.plan_fwd(&problem.validate()?, &PlanOptions::default())?;
    println!("{}, {types}, page_size {page_size}", backend.name());
    let mut best = [[f64::INFINITY; 2]; 3];
    let page_lines = cache_bytes / table.len().max(1) / size_of::<Line>();
    if page_size > 0 && table.len() * page_lines * size_of::<Line>() != cache_bytes {
        return Err(format!("pages of {page_size} are no whole lines of the cache").into());
    }
    let in_pages = (page_size > 0).then_some(Pages(&table, page_lines));
    let readers = Readers::new([&k, &v], in_pages, threads);
    let mut measure = || -> Result<(), fmha_core::Error> {
        for _ in 0..turns {
            let mut result = Ok(());
            let ours = timed(|| {
                let (k, v) = (
                    DevSlice::host(bytemuck::cast_slice::<Line, u8>(&k)),
                    DevSlice::host(bytemuck::cast_slice::<Line, u8>(&v)),
                );
                let mut args = FwdArgs::new(
                    DevSlice::host(bytemuck::cast_slice::<Line, u8>(&q)),
                    k,
                    v,
                    DevSliceMut::host(bytemuck::cast_slice_mut::<Line, u8>(&mut o)),
                );
                if page_size > 0 {
                    let block_table = BlockTable { pages: DevSlice::host(&table), max_pages: pages };
                    args.seq.totals.num_pages = Some(batch * pages);
                    args.seq.block_table = Some(block_table);
                }
                result = plan.run(&mut args, &backend.default_stream());
            });
            result?;
            let mut keep = |at: usize, time: (f64, f64)| {
                best[at] = [best[at][0].min(time.0), best[at][1].min(time.1)];
            };
            keep(0, ours);
            for asks in [false, true] {
                keep(1, timed(|| readers.read(Way::Plain { asks })));
                keep(2, timed(|| readers.read(Way::ByLines { asks })));
            }
        }
        Ok(())
    };
    let result = std::thread::scope(|scope| {
        for thread in 1..threads {
            let readers = &readers;
            scope.spawn(move || readers.serve(thread));
        }
        let result = measure();
        readers.end();
        result
    });
    result?;
    let bytes = 2.0 * cache_bytes as f64;
    for (at, clock) in [(0, "by the clock"), (1, "by this thread's processor time")] {
        if at == 1 && threads > 1 {
            continue;
        }
        let [ours, plain, by_lines] = best.map(|times| bytes / times[at] / 1e9);
        let ratios = [ours / plain, ours / by_lines];
        println!(
            "{clock}: decode {ours:.2} GB/s, reads {plain:.2} GB/s, ratio {:.3}, lines in its order {by_lines:.2} GB/s, ratio {:.3}",
            ratios[0], ratios[1]
        );
    }
    Ok(())
}
