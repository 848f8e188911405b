//! Test that Python can set every field of the C library's structs, except for fields listed here with a reason. A test
//! of the C library checks that its structs reach every field of the contract.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;

use fmha_c::{FMHA_BF16, FMHA_E4M3FN, FMHA_F16, FMHA_F32};

use crate::call::Call;
use crate::combine::Combine;
use crate::request::{ADDS_TO, BlockScales, Captured, Code, Lists, OPTIONS, Request, Slot};
use crate::tensor::{Device, I32, MAX_DIMS, Tensor, U8, U32};

/// Fields of the C structs that Python never sets, with the reason.
const NOT_SET: [(&str, &str); 16] = [
    ("args.built", "a mask object's, which a run finds by the tensors of its masks"),
    ("args.reserved", "0"),
    ("args.workspace", "from the caller's allocator, at each run"),
    ("args.workspace_bytes", "likewise"),
    ("block_scales.reserved", "0"),
    ("captured.reserved", "0"),
    ("captured_args.reserved", "0"),
    ("gradients.reserved", "0"),
    ("masks.full_kv_num_blocks.dim_stride", "counts have no axis behind that of the blocks"),
    ("masks.kv_num_blocks.dim_stride", "likewise"),
    ("options.kernel", "left to the planner, who says what it chose"),
    ("options.tile", "likewise"),
    ("problem.mask", "given as a value, beside the problem"),
    ("problem.part", "`fmha.dist` makes parts of a whole, and runs them"),
    ("problem.reserved", "0"),
    ("second.reserved", "0"),
];

#[derive(Default)]
struct Seen(BTreeMap<String, BTreeSet<String>>);

impl Seen {
    fn add(&mut self, what: &str, value: &dyn std::fmt::Debug) {
        let mut path = vec![what.to_owned()];
        for line in format!("{value:#?}").lines().map(str::trim) {
            match line.split_once(": ") {
                Some((name, "FmhaStrides {")) => path.push(name.to_owned()),
                Some((name, held)) => {
                    let field = format!("{}.{name}", path.join("."));
                    let held = held.trim_end_matches(',');
                    let address = held.strip_prefix("0x");
                    let held = address
                        .map_or(held, |digits| if digits.chars().all(|c| c == '0') { "0" } else { "given" });
                    self.0.entry(field).or_default().insert(held.to_owned());
                }
                None if path.len() > 1 => drop(path.pop()),
                None => (),
            }
        }
    }

    fn call(&mut self, request: &Request) {
        let call = Call::new(request).unwrap();
        self.add("options", &call.options().plan);
        let args = call.args();
        self.add("args", &args);
        // SAFETY: null, or this call's own struct.
        unsafe { args.second.as_ref() }.into_iter().for_each(|second| self.add("second_args", second));
        call.with(|problem| {
            self.add("problem", problem);
            // SAFETY: null, or this call's own structs.
            let (gradients, cache, lists) =
                unsafe { (problem.gradients.as_ref(), problem.cache.as_ref(), problem.lists.as_ref()) };
            // SAFETY: null, or this call's own struct.
            let (scales, masks) = unsafe { (problem.block_scales.as_ref(), problem.masks.as_ref()) };
            // SAFETY: null, or this call's own struct.
            let second = unsafe { problem.second.as_ref() };
            second.into_iter().for_each(|second| self.add("second", second));
            scales.into_iter().for_each(|scales| self.add("block_scales", scales));
            lists.into_iter().for_each(|lists| self.add("lists", lists));
            masks.into_iter().for_each(|masks| self.add("masks", masks));
            gradients.into_iter().for_each(|gradients| self.add("gradients", gradients));
            cache.into_iter().for_each(|cache| self.add("cache", cache));
        });
    }
}

/// A tensor whose address is never read: only whether the tensor is given matters.
fn tensor(sizes: &[i64], dtype: i32) -> Tensor {
    let mut tensor = Tensor { num_dims: sizes.len() as i32, dtype, ..Tensor::ABSENT };
    tensor.data = std::ptr::without_provenance_mut::<c_void>(256);
    let mut stride = 1;
    for axis in (0..sizes.len()).rev() {
        (tensor.sizes[axis], tensor.strides[axis]) = (sizes[axis], stride);
        stride *= sizes[axis];
    }
    assert!(sizes.len() <= MAX_DIMS);
    tensor
}

fn request(tensors: &[(Slot, Tensor)]) -> Request {
    let mut request = Request::new();
    tensors.iter().for_each(|&(slot, tensor)| request.set(slot, tensor));
    request
}

fn plain(n: i64, dtype: i32) -> Vec<(Slot, Tensor)> {
    let (batch, seqlen_q, seqlen_k, kv, dim, dim_v) = (n, n + 1, n + 2, n, 8 * n, 16 * n);
    let heads = 2 * kv;
    vec![
        (Slot::Q, tensor(&[batch, seqlen_q, heads, dim], dtype)),
        (Slot::K, tensor(&[batch, seqlen_k, kv, dim], dtype)),
        (Slot::V, tensor(&[batch, seqlen_k, kv, dim_v], dtype)),
        (Slot::O, tensor(&[batch, seqlen_q, heads, dim_v], dtype)),
    ]
}

fn and(mut tensors: Vec<(Slot, Tensor)>, more: &[(Slot, Tensor)]) -> Vec<(Slot, Tensor)> {
    tensors.extend_from_slice(more);
    tensors
}

/// Calls of two sequences of 3 queries and 4 keys that together set every optional argument.
fn requests() -> Vec<Request> {
    use Slot::*;
    let (f32s, i32s) = (|sizes: &[i64]| tensor(sizes, FMHA_F32), |sizes: &[i64]| tensor(sizes, I32));
    let two = || plain(2, FMHA_F16);
    let lse = (Lse, f32s(&[2, 4, 3]));
    let mut all = vec![
        request(&plain(1, FMHA_F16)),
        request(&and(
            two(),
            &[(RowMax, f32s(&[2, 4, 3])), (HeadMax, f32s(&[4])), (KeySum, f32s(&[2, 4, 4]))],
        )),
        request(&and(two(), &[lse, (KeepMask, tensor(&[2, 4, 3, 4], U8)), (Bias, f32s(&[2, 4, 3, 4]))])),
        request(&and(
            two(),
            &[
                (AlibiSlopes, f32s(&[2, 4])),
                (Sink, f32s(&[4])),
                (SequsedQ, i32s(&[2])),
                (SequsedK, i32s(&[2])),
            ],
        )),
    ];
    let mut columns = two();
    columns[2].1.strides = [128, 1, 512, 4, 0];
    columns[2].1.sizes = [2, 4, 2, 32, 0];
    all.push(request(&columns));
    let fp8 = plain(2, FMHA_E4M3FN);
    let mut fp8 =
        and(fp8, &[(DescaleQ, f32s(&[])), (DescaleK, f32s(&[])), (DescaleV, f32s(&[])), (ScaleO, f32s(&[]))]);
    fp8[3].1.dtype = FMHA_BF16;
    all.push(request(&fp8));
    let packed = [
        (Q, tensor(&[6, 4, 16], FMHA_F16)),
        (K, tensor(&[8, 2, 16], FMHA_F16)),
        (V, tensor(&[8, 2, 32], FMHA_F16)),
        (O, tensor(&[6, 4, 32], FMHA_F16)),
        (CuSeqlensQ, i32s(&[3])),
        (CuSeqlensK, i32s(&[3])),
    ];
    let mut packed = request(&packed);
    (packed.numbers.max_seqlen_q, packed.numbers.max_seqlen_k) = (3, 4);
    all.push(packed);
    let pages = [
        (Q, tensor(&[2, 3, 4, 16], FMHA_F16)),
        (K, tensor(&[5, 16, 2, 16], FMHA_E4M3FN)),
        (V, tensor(&[5, 16, 2, 32], FMHA_E4M3FN)),
        (O, tensor(&[2, 3, 4, 32], FMHA_F16)),
        (BlockTable, i32s(&[2, 2])),
        (SequsedK, i32s(&[2])),
        (TreeMask, tensor(&[2, 3, 1], U32)),
    ];
    all.push(request(&pages));
    let scaled = [(KScale, f32s(&[5, 16, 2])), (VScale, f32s(&[5, 16, 2]))];
    let mut by_rows = request(&and(pages[..6].to_vec(), &scaled));
    by_rows.numbers.scale_block = 1;
    all.push(by_rows);
    let blocks = [(KScale, f32s(&[5, 4, 2])), (VScale, f32s(&[5, 4, 2]))];
    let mut by_blocks = request(&and(pages[..6].to_vec(), &blocks));
    by_blocks.numbers.scale_block = 4;
    all.push(by_blocks);
    let turning = [
        (KNew, tensor(&[2, 1, 2, 16], FMHA_F16)),
        (VNew, tensor(&[2, 1, 2, 32], FMHA_F16)),
        (RotaryCos, f32s(&[9, 4])),
        (RotarySin, f32s(&[9, 4])),
        (SequsedK, i32s(&[2])),
    ];
    let mut turning = request(&and(two(), &turning));
    turning.numbers.rotary_interleaved = 1;
    all.push(turning);
    let new = [
        (KNew, tensor(&[3, 2, 16], FMHA_F16)),
        (VNew, tensor(&[3, 2, 32], FMHA_F16)),
        (CuSeqlensNew, i32s(&[3])),
        (SequsedK, i32s(&[2])),
    ];
    let mut new = request(&and(two(), &new));
    new.numbers.max_seqlen_new = 2;
    all.push(new);
    let mut in_k = two();
    in_k.remove(2);
    in_k[1].1 = tensor(&[2, 4, 2, 16], FMHA_F16);
    in_k[2].1 = tensor(&[2, 3, 4, 8], FMHA_F16);
    let mut in_k = request(&in_k);
    in_k.numbers.head_dim_v = 8;
    all.push(in_k);
    let rows_of_bytes = [
        (Q, tensor(&[2, 3, 4, 576], FMHA_BF16)),
        (K, tensor(&[5, 16, 1, 656], U8)),
        (O, tensor(&[2, 3, 4, 512], FMHA_BF16)),
        (BlockTable, i32s(&[2, 2])),
    ];
    let mut rows_of_bytes = request(&rows_of_bytes);
    rows_of_bytes.numbers.head_dim_v = 512;
    all.push(rows_of_bytes);
    for (n, dtype) in [(1, FMHA_F16), (2, FMHA_F32)] {
        let tensors = plain(n, dtype);
        let like = |slot: Slot| tensors.iter().find(|(other, _)| *other == slot).unwrap().1;
        let gradients =
            [(Dout, like(O)), (Dq, like(Q)), (Dk, like(K)), (Dv, like(V)), (Lse, f32s(&[n, 2 * n, n + 1]))];
        let mut gradients = and(tensors, &gradients);
        if n == 2 {
            gradients.extend([
                (Bias, f32s(&[2, 4, 3, 4])),
                (Dbias, f32s(&[2, 4, 3, 4])),
                (Sink, f32s(&[4])),
                (Dsink, f32s(&[4])),
                (Dlse, f32s(&[2, 4, 3])),
            ]);
        }
        all.push(request(&gradients));
    }
    let mut numbers = request(&plain(1, FMHA_F16));
    numbers.stream = 256;
    (numbers.numbers.softmax_scale, numbers.numbers.softcap, numbers.numbers.p_drop) = (0.5, 0.5, 0.5);
    (numbers.numbers.seed, numbers.numbers.offset) = (3, 4);
    numbers.numbers.options = (1 << OPTIONS.len()) - 1;
    (numbers.numbers.mask, numbers.numbers.left, numbers.numbers.right) = (2, 3, 0);
    all.push(numbers);
    let mut elsewhere = plain(1, FMHA_F16);
    elsewhere.iter_mut().for_each(|(_, tensor)| tensor.device = Device { kind: 1, index: 1 });
    all.push(request(&elsewhere));
    all
}

/// A call with a score and a mask as code, and gradients of captured tensors.
fn coded(seen: &mut Seen) {
    let names = [c"slopes", c"left", c"by"];
    let captured = names.map(|name| Captured {
        name: name.as_ptr(),
        tensor: Tensor::ABSENT,
        gradient: Tensor::ABSENT,
        real: 2.0,
        integer: 3,
    });
    let mut captured = captured;
    (captured[0].tensor, captured[0].gradient) = (tensor(&[2, 3], FMHA_F32), tensor(&[2, 3], FMHA_BF16));
    let code = Code {
        score: c"slopes: f32[_, _]; by: float; s + by * slopes[b, h]".as_ptr(),
        mask: c"left: int; q - k <= left".as_ptr(),
        captured: captured.as_ptr(),
        num_captured: 3,
    };
    for n in [1, 2] {
        let mut request = request(&plain(n, FMHA_F16));
        if n == 2 {
            request.code = &raw const code;
        }
        seen.call(&request);
        let call = Call::new(&request).unwrap();
        let args = call.args();
        call.with(|problem| {
            // SAFETY: null, or this call's own struct with its list.
            let Some(code) = (unsafe { problem.code.as_ref() }) else { return };
            seen.add("code", code);
            // SAFETY: this call's own lists.
            let (list, args) = unsafe {
                let count = code.num_captured as usize;
                (
                    std::slice::from_raw_parts(code.captured, count),
                    std::slice::from_raw_parts(args.captured, count),
                )
            };
            list.iter().for_each(|captured| seen.add("captured", captured));
            args.iter().for_each(|captured| seen.add("captured_args", captured));
        });
    }
}

/// Calls with lists of keys: positions of blocks, and addresses.
fn listed(seen: &mut Seen) {
    let two = plain(2, FMHA_F16);
    let indices = tensor(&[2, 3, 2, 5], I32);
    for (topk_length, block, addresses) in
        [(Tensor::ABSENT, 1, 0), (tensor(&[2], I32), 16, 0), (tensor(&[2, 3], I32), 1, 1)]
    {
        let lists = Lists { indices, topk_length, block, addresses, lse_without_sink: 1 };
        let mut request = request(&two);
        request.lists = &raw const lists;
        seen.call(&request);
    }
}

/// Calls with a second cache: strided with intervals, packed, and paged with lists.
fn joined(seen: &mut Seen) {
    let (f16s, i32s) = (|sizes: &[i64]| tensor(sizes, FMHA_F16), |sizes: &[i64]| tensor(sizes, I32));
    let first = plain(2, FMHA_F16);
    let like = |slot: Slot| (slot, first.iter().find(|(other, _)| *other == slot).unwrap().1);
    let over = |keys: &[i64], more: &[(Slot, Tensor)]| {
        let [k, v] = [16, 32].map(|dim| f16s(&[keys, &[2, dim]].concat()));
        request(&and(vec![like(Slot::Q), like(Slot::O), (Slot::K, k), (Slot::V, v)], more))
    };
    let lists = Lists {
        indices: i32s(&[2, 3, 2, 5]),
        topk_length: i32s(&[2]),
        block: 1,
        addresses: 0,
        lse_without_sink: 1,
    };
    let strided = over(&[2, 6], &[(Slot::SequsedK, i32s(&[2])), (Slot::Intervals, i32s(&[2, 2, 2, 3]))]);
    let mut packed = over(&[8], &[(Slot::CuSeqlensK, i32s(&[3]))]);
    packed.numbers.max_seqlen_k = 5;
    let mut paged = over(&[5, 16], &[(Slot::BlockTable, i32s(&[2, 2]))]);
    paged.lists = &raw const lists;
    for second in [strided, packed, paged] {
        let mut request = request(&first);
        request.second = &raw const second;
        seen.call(&request);
    }
}

/// Calls with scales by blocks.
fn scaled(seen: &mut Seen) {
    for (format, stored, pack, block) in [(1, FMHA_E4M3FN, 1, 32), (3, U8, 2, 16)] {
        for n in [2, 3] {
            let dim = 32 * n;
            let rows = |keys: i64, heads: i64, dim: i64, dtype| tensor(&[n, keys, heads, dim], dtype);
            let mut scales = BlockScales {
                q: rows(n + 1, 2 * n, dim / block, U8),
                k: rows(n + 40, n, dim / block, U8),
                v: rows((n + 40 + block - 1) / block, n, dim, U8),
                format,
                values: FMHA_BF16.into(),
            };
            // The tensors of scales have gaps between rows.
            for tensor in [&mut scales.q, &mut scales.k, &mut scales.v] {
                tensor.strides = tensor.strides.map(|step| (n - 1) * step);
            }
            let mut request = request(&[
                (Slot::Q, rows(n + 1, 2 * n, dim / pack, stored)),
                (Slot::K, rows(n + 40, n, dim / pack, stored)),
                (Slot::V, rows(n + 40, n, dim / pack, stored)),
                (Slot::O, rows(n + 1, 2 * n, dim, FMHA_BF16)),
            ]);
            request.block_scales = &raw const scales;
            seen.call(&request);
        }
    }
}

/// A call with masks as data.
fn masked(seen: &mut Seen) {
    for n in [2, 3] {
        let (counts, indices) = (tensor(&[n, 2 * n, n + 1], I32), tensor(&[n, 2 * n, n + 1, n], I32));
        let mut request = request(&and(
            plain(n, FMHA_F16),
            &[
                (Slot::Intervals, tensor(&[n, n, 2, n + 1], I32)),
                (Slot::MaskBits, tensor(&[n, 2 * n, n + 1, 1], U32)),
                (Slot::KvNumBlocks, counts),
                (Slot::KvIndices, indices),
                (Slot::FullKvNumBlocks, counts),
                (Slot::FullKvIndices, indices),
            ],
        ));
        (request.numbers.block_q, request.numbers.block_k) = (1, n);
        if n == 3 {
            request.tensors[Slot::K as usize] = tensor(&[n, 65, n, 8 * n], FMHA_F16);
            request.tensors[Slot::V as usize] = tensor(&[n, 65, n, 16 * n], FMHA_F16);
            request.set(Slot::MaskBits, tensor(&[n, 2 * n, n + 1, 3], U32));
        }
        seen.call(&request);
    }
}

#[test]
fn every_field_of_the_structs_can_be_set_but_for_those_that_have_a_reason() {
    let mut seen = Seen::default();
    requests().iter().for_each(|request| seen.call(request));
    coded(&mut seen);
    listed(&mut seen);
    joined(&mut seen);
    scaled(&mut seen);
    masked(&mut seen);
    for (n, dtype, adds) in [(1, FMHA_F16, 0), (2, FMHA_F32, ADDS_TO)] {
        let rows = [n, n + 1, n + 2, n + 3];
        let mut request = request(&[
            (Slot::OParts, tensor(&[n, n, n + 1, n + 2, n + 3], dtype)),
            (Slot::O, tensor(&rows, dtype)),
            (Slot::LseParts, tensor(&[n, n, n + 2, n + 1], FMHA_F32)),
            (Slot::Lse, tensor(&[n, n + 2, n + 1], FMHA_F32)),
        ]);
        request.numbers.options = adds;
        request.stream = n - 1;
        let combine = Combine::new(&request).unwrap();
        seen.add("combine", &combine.problem);
        seen.add("combine_args", &combine.args());
    }
    let none = ["0", "0.0", "None", "[]", "false", "Fast"];
    let zero = |held: &BTreeSet<String>| held.iter().all(|held| none.contains(&&**held));
    let not_set: Vec<&str> =
        seen.0.iter().filter(|(_, held)| zero(held)).map(|(field, _)| &**field).collect();
    let mut known = NOT_SET.map(|(field, _)| field);
    known.sort_unstable();
    assert_eq!(not_set, known, "not set from Python, or not tried here");
    assert!(seen.0.len() > 120, "{:#?}", seen.0.keys());
}
