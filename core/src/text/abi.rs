//! Structs and constants that host and device share, declared once in Rust and rendered to C++.
//!
//! - [`abi_struct!`](crate::abi_struct): a `repr(C)` struct that a kernel takes as an argument. A static assertion
//!   in the kernel compares its size with Rust's; since there is no implicit padding (checked in Rust), size and
//!   order fix the layout.
//! - [`abi_spec!`](crate::abi_spec): a struct of compile-time facts. It is passed as text, a C++20 designated
//!   initialiser, so fields are matched by name and not by layout.
//! - [`abi_enum!`](crate::abi_enum): an enum inside a spec, with the same names on both sides.
//! - [`abi_functions!`](crate::abi_functions): numbers derived from specs ([`functions`](crate::functions)).
//! - [`abi_memory!`](crate::abi_memory): shared memory as a list of parts ([`memory`](crate::memory)).

use std::marker::PhantomData;

use crate::dtype::DType;
use crate::layout::{Strides, VLayout};
use crate::mask::{MaskAlign, MaskBounds, MaskKind, MaskSpec};

/// A type that both host and device have.
pub trait AbiType: Copy {
    /// The type's C++ name.
    fn c_name() -> String;
}

/// A struct of run-time arguments.
pub trait AbiStruct: AbiType {
    /// The type's C++ definition, with a static assertion of its size.
    fn c_definition() -> String;
}

/// A type whose values are rendered as text of the kernel's source.
pub trait AbiLiteral {
    /// The C++ type's name.
    fn c_type() -> &'static str;
    /// The C++ definition of the type; empty for types that C++ has itself.
    fn c_definition() -> String {
        String::new()
    }
    /// Renders this value as a C++ expression.
    fn c_literal(&self) -> String;
}

macro_rules! scalars {
    ($($rust:ty => $c:literal),* $(,)?) => {$(
        impl AbiType for $rust {
            fn c_name() -> String {
                $c.to_owned()
            }
        }
    )*};
}
scalars!(f32 => "float", i32 => "int32_t", u32 => "uint32_t", i64 => "int64_t", u64 => "uint64_t", u8 => "uint8_t");

impl AbiLiteral for bool {
    fn c_type() -> &'static str {
        "bool"
    }
    fn c_literal(&self) -> String {
        self.to_string()
    }
}

impl AbiLiteral for i32 {
    fn c_type() -> &'static str {
        "int32_t"
    }
    fn c_literal(&self) -> String {
        self.to_string()
    }
}

/// Stands for elements whose type is part of the spec; `void` in C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Untyped;

impl AbiType for Untyped {
    fn c_name() -> String {
        "void".to_owned()
    }
}

/// An address in the device's memory; 0 if a call has no such operand.
#[repr(transparent)]
#[derive(Debug, PartialEq, Eq)]
pub struct DevPtr<T>(pub u64, PhantomData<T>);

impl<T> DevPtr<T> {
    /// The null pointer of an absent operand.
    pub const NULL: Self = Self(0, PhantomData);

    /// An address on the device.
    #[must_use]
    pub const fn new(address: u64) -> Self {
        Self(address, PhantomData)
    }
}

impl<T> Clone for DevPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for DevPtr<T> {}

impl<T: AbiType> AbiType for DevPtr<T> {
    fn c_name() -> String {
        format!("{}*", T::c_name())
    }
}

impl<T: AbiType, const N: usize> AbiType for [T; N] {
    fn c_name() -> String {
        format!("Array<{}, {N}>", T::c_name())
    }
}

/// Declares a `repr(C)` struct and its C++ definition.
#[macro_export]
macro_rules! abi_struct {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$field_meta:meta])* pub $field:ident : $type:ty,)*
    }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)* }

        // There is no implicit padding, so size and order fix the layout.
        const _: () = assert!(
            0 $(+ size_of::<$type>())* == size_of::<$name>(),
            concat!(stringify!($name), " has implicit padding")
        );

        impl $crate::abi::AbiType for $name {
            fn c_name() -> String { stringify!($name).to_owned() }
        }

        impl $crate::abi::AbiStruct for $name {
            fn c_definition() -> String {
                let fields: &[(String, &str)] =
                    &[$((<$type as $crate::abi::AbiType>::c_name(), stringify!($field)),)*];
                $crate::abi::struct_text(stringify!($name), fields, size_of::<$name>(), align_of::<$name>())
            }
        }
    };
}

/// Declares a struct of compile-time facts, its C++ definition and its C++ literal, and the [list of its
/// fields](crate::fields). After `=` a field may list the values that a user may set.
#[macro_export]
macro_rules! abi_spec {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$field_meta:meta])* pub $field:ident : $type:ty $(= $takes:expr)?,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)* }

        impl $crate::abi::AbiLiteral for $name {
            fn c_type() -> &'static str { stringify!($name) }
            fn c_definition() -> String {
                let fields: &[(&str, &str)] =
                    &[$((<$type as $crate::abi::AbiLiteral>::c_type(), stringify!($field)),)*];
                let fields: String =
                    fields.iter().map(|(ty, field)| format!("  {ty} {field};\n")).collect();
                format!("struct {} {{\n{fields}}};\n", stringify!($name))
            }
            fn c_literal(&self) -> String {
                let fields: Vec<String> = vec![$(format!(
                    ".{} = {}", stringify!($field), $crate::abi::AbiLiteral::c_literal(&self.$field)
                ),)*];
                format!("{{ {} }}", fields.join(", "))
            }
        }

        impl $crate::fields::Fields for $name {
            fn fields() -> &'static [$crate::fields::Field] {
                const { &[$($crate::fields::Field {
                    name: stringify!($field),
                    takes: $crate::abi_spec!(@takes $($takes)?),
                    value_names: <$type as $crate::fields::FieldValue>::names,
                },)*] }
            }

            fn named_values(&self) -> Vec<(&'static str, String)> {
                vec![$((stringify!($field), $crate::fields::FieldValue::name(&self.$field)),)*]
            }

            fn set_field(&mut self, name: &str, value: &str) -> Result<(), String> {
                let fields = <Self as $crate::fields::Fields>::fields();
                let Some(field) = fields.iter().find(|field| field.name == name) else {
                    return Err($crate::fields::no_such_field(name, value, fields));
                };
                $(if name == stringify!($field) {
                    self.$field = field.parse::<$type>(value)?;
                })*
                Ok(())
            }
        }
    };
    (@takes) => { $crate::fields::Takes::all() };
    (@takes $takes:expr) => { $takes };
}

/// Declares an enum with the same names in Rust and in C++; a user writes `OneByOne` as `one_by_one`. Leaving out a
/// variant is a compile error.
#[macro_export]
macro_rules! abi_enum {
    ($name:ident { $($variant:ident),* $(,)? }) => {
        impl $crate::abi::AbiLiteral for $name {
            fn c_type() -> &'static str { stringify!($name) }
            fn c_definition() -> String {
                let variants: &[&str] = &[$(stringify!($variant)),*];
                format!("enum class {} {{ {} }};\n", stringify!($name), variants.join(", "))
            }
            fn c_literal(&self) -> String {
                match self { $($name::$variant => concat!(stringify!($name), "::", stringify!($variant)),)* }
                    .to_owned()
            }
        }

        impl $crate::fields::FieldValue for $name {
            fn names() -> Vec<String> {
                [$(stringify!($variant)),*].map($crate::fields::snake_case).to_vec()
            }
            fn of_name(name: &str) -> Option<Self> {
                [$($name::$variant),*].into_iter().find(|value| $crate::fields::FieldValue::name(value) == name)
            }
            fn name(&self) -> String {
                $crate::fields::snake_case(match self { $($name::$variant => stringify!($variant),)* })
            }
        }
    };
}

abi_enum!(DType { F32, F16, Bf16, E4m3Fn, E5m2, E4m3Fnuz, E5m2Fnuz });
abi_enum!(MaskKind { Full, Upper, Band });
abi_enum!(VLayout { RowMajor, ColMajor });

#[doc(hidden)]
#[must_use]
pub fn struct_text(name: &str, fields: &[(String, &str)], size: usize, align: usize) -> String {
    let fields: String = fields.iter().map(|(ty, field)| format!("  {ty} {field};\n")).collect();
    format!(
        "struct {name} {{\n{fields}}};\n\
         static_assert(sizeof({name}) == {size} && alignof({name}) == {align}, \
         \"{name}: host and device disagree\");\n"
    )
}

abi_struct! {
    /// A tensor with axes `[batch, row, head, dim]`, whatever their order in memory; strides in elements.
    pub struct View {
        /// The tensor's first element.
        pub data: DevPtr<Untyped>,
        /// Stride from one sequence to the next; 0 if packed or broadcast.
        pub batch: i64,
        /// Stride from row to row.
        pub row: i64,
        /// Stride from head to head.
        pub head: i64,
        /// Stride between elements of a row: 1, except for a column-major V.
        pub dim: i64,
    }
}

impl View {
    /// The view of an absent tensor.
    pub const NULL: Self = Self { data: DevPtr::NULL, batch: 0, row: 0, head: 0, dim: 0 };

    /// A tensor of a problem at `address`. `packed` tensors have no batch axis.
    #[must_use]
    pub fn new(address: u64, strides: Strides, packed: bool) -> Self {
        let batch = if packed { 0 } else { strides.batch };
        Self { data: DevPtr::new(address), batch, row: strides.seq, head: strides.head, dim: strides.dim }
    }
}

abi_struct! {
    /// f32 numbers of a (batch, head): element `i_batch * batch + i_head * head`. For descales the head is a kv
    /// head, for slopes and sinks a query head; a stride of 0 broadcasts.
    pub struct HeadScalars {
        /// First of the f32 numbers.
        pub data: DevPtr<f32>,
        /// Stride from one sequence to the next.
        pub batch: i32,
        /// Stride from one head to the next.
        pub head: i32,
    }
}

impl HeadScalars {
    /// No scalars: a null pointer.
    pub const NULL: Self = Self { data: DevPtr::NULL, batch: 0, head: 0 };
}

abi_struct! {
    /// A mask before a sequence's lengths are known, in the form of [`MaskSpec::bounds`].
    pub struct MaskParams {
        /// Smallest visible `j - i - diag`; `i32::MIN` = unbounded.
        pub lo: i32,
        /// Largest visible `j - i - diag`; `i32::MAX` = unbounded.
        pub hi: i32,
        /// Whether the diagonal is bottom-right: with 1 `diag` is `seqlen_k - seqlen_q`, with 0 it is 0.
        pub bottom_right: i32,
        /// Number of leading keys that `lo` does not hide.
        pub sink_columns: i32,
    }
}

impl From<MaskSpec> for MaskParams {
    fn from(mask: MaskSpec) -> Self {
        Self::from((mask.bounds(), mask.sink_columns))
    }
}

/// Conversion from a mask's limits and its number of sink columns.
impl From<(MaskBounds, u32)> for MaskParams {
    /// The conversion to i32 saturates and is still exact: lengths fit 31 bits, so a bound outside i32 shows and
    /// hides the same keys as the nearest i32.
    fn from((bounds, sink_columns): (MaskBounds, u32)) -> Self {
        let saturated = |bound: i64| bound.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
        Self {
            lo: bounds.lo.map_or(i32::MIN, saturated),
            hi: bounds.hi.map_or(i32::MAX, saturated),
            bottom_right: i32::from(bounds.align == MaskAlign::BottomRight),
            sink_columns: i32::try_from(sink_columns).unwrap_or(i32::MAX),
        }
    }
}

/// Number of 64-bit words in a kernel's arguments for the tensors and numbers that functions capture.
pub const CODE_WORDS: usize = 48;

abi_struct! {
    /// Parameters of a forward kernel. Facts known at compile time are in [`FwdSpec`](crate::spec::FwdSpec),
    /// not here.
    pub struct FwdParams {
        /// Q, `[batch, seqlen_q, num_heads_q, head_dim_qk]`, or packed by `cu_seqlens_q`.
        pub q: View,
        /// K, `[batch, seqlen_k, num_heads_kv, head_dim_qk]`, packed by `cu_seqlens_k`, or `[num_pages, page_size,
        /// ..]`.
        pub k: View,
        /// V, `[batch, seqlen_k, num_heads_kv, head_dim_v]`, packed by `cu_seqlens_k`, or `[num_pages, page_size, ..]`.
        pub v: View,
        /// O, `[batch, seqlen_q, num_heads_q, head_dim_v]`, or packed by `cu_seqlens_q`.
        pub o: View,
        /// Elementwise bias, `[batch, num_heads_q, seqlen_q, seqlen_k]` with the query as row and the key as dim;
        /// broadcast axes have stride 0.
        pub bias: View,
        /// Natural log-sum-exp of each row; null if it is not wanted.
        pub lse: DevPtr<f32>,
        /// Stride of `lse` from sequence to sequence; 0 when packed.
        pub lse_batch: i64,
        /// Stride of `lse` from head to head; rows are adjacent.
        pub lse_head: i64,
        /// Keep mask of dropout, `[batch, num_heads_q, seqlen_q, seqlen_k]`, 1 = kept; null if it is not wanted.
        pub keep_mask: DevPtr<u8>,
        /// `[batch + 1]`, first row of each packed sequence of Q; null when Q is not packed.
        pub cu_seqlens_q: DevPtr<i32>,
        /// `[batch + 1]`, first row of each packed sequence of K; null when K is not packed.
        pub cu_seqlens_k: DevPtr<i32>,
        /// `[batch]`: number of queries in use of each sequence; null: all its rows.
        pub seqused_q: DevPtr<i32>,
        /// `[batch]`: number of keys in use of each sequence; null: all its rows.
        pub seqused_k: DevPtr<i32>,
        /// `[batch, max_pages]`, the pages of each sequence; null when K is not paged.
        pub block_table: DevPtr<i32>,
        /// Stride of `block_table` from sequence to sequence.
        pub block_table_batch: i64,
        /// Slopes of ALiBi.
        pub alibi_slopes: HeadScalars,
        /// The learnable sinks.
        pub sink: HeadScalars,
        /// Factors of FP8 Q; null means 1.
        pub descale_q: HeadScalars,
        /// Factors of FP8 K; null means 1.
        pub descale_k: HeadScalars,
        /// Factors of FP8 V; null means 1.
        pub descale_v: HeadScalars,
        /// Factor of O before it is rounded to FP8; null means 1.
        pub scale_o: DevPtr<f32>,
        /// Scratch of the kernel's own; null when it needs none.
        pub workspace: DevPtr<Untyped>,
        /// Number of sequences.
        pub batch: i32,
        /// Number of queries of a sequence; if packed, an upper bound.
        pub seqlen_q: i32,
        /// Number of keys of a sequence; if packed or paged, an upper bound.
        pub seqlen_k: i32,
        /// Number of rows of packed Q; `seqlen_q` if Q is not packed.
        pub total_q: i32,
        /// Number of rows of packed K; `seqlen_k` if K is not packed.
        pub total_k: i32,
        /// Number of pages of K and V; 0 if they are not paged.
        pub num_pages: i32,
        /// Number of rows of a page; 1 if K is not paged.
        pub page_size: i32,
        /// Number of query heads.
        pub num_heads_q: i32,
        /// Number of key and value heads.
        pub num_heads_kv: i32,
        /// Number of query heads for each kv head, `num_heads_q / num_heads_kv`.
        pub gqa_ratio: i32,
        /// Mask that decides which keys a query sees.
        pub mask: MaskParams,
        /// Diagonal from which `ALiBi` measures: with 1 `seqlen_k - seqlen_q`, with 0 the diagonal 0.
        pub alibi_bottom_right: i32,
        /// Shift of ALiBi's diagonal, if the call is a part of a whole: the position of the whole's diagonal in it.
        pub alibi_shift: i32,
        /// Factor of `Q K^T`.
        pub softmax_scale: f32,
        /// Cap of the soft-cap; 0 if there is none.
        pub softcap: f32,
        /// A score is kept if its Philox word is less than this.
        pub dropout_threshold: u32,
        /// Factor `1 / (1 - p_drop)` of kept probabilities.
        pub dropout_scale: f32,
        /// Low word of dropout's seed.
        pub dropout_key_low: u32,
        /// High word of dropout's seed.
        pub dropout_key_high: u32,
        /// Last word of the generator's counter.
        pub dropout_offset: u32,
        /// Position of the call's first query in the whole that it is a part of.
        pub dropout_first_query: i32,
        /// Position of the call's first key in the whole, divided by four: the index of its group of four keys.
        pub dropout_first_quad: i32,
        /// Position of the call's first key within its group of four; 0 for kernels that decide four keys at once.
        pub dropout_key_of_quad: i32,
        /// Index `i_batch * num_heads_q + i_head` that the call's first sequence and head have in the whole.
        pub dropout_first_head: i32,
        /// Number of query heads of the whole.
        pub dropout_num_heads: i32,
        /// Words with the values that a score and a mask as code capture
        /// ([`CodeSource`](crate::code_source::CodeSource)).
        pub code: [u64; CODE_WORDS],
    }
}

abi_struct! {
    /// Parameters for keys that arrive while the call runs: ends and flags of their pieces
    /// ([`Arrivals`](crate::Arrivals)).
    pub struct ArrivalParams {
        /// One past the last row of each piece.
        pub ends: DevPtr<u32>,
        /// Flags of the pieces, one each, followed by a word that only the kernel uses.
        pub flags: DevPtr<u32>,
        /// Bit mask of the pieces that have arrived before the call.
        pub here: u64,
        /// Nanoseconds for which a thread waits for a piece.
        pub timeout_ns: u64,
        /// Number of pieces.
        pub count: i64,
    }
}

abi_struct! {
    /// Parameters of a backward kernel. Facts known at compile time are in [`BwdSpec`](crate::spec::BwdSpec),
    /// not here.
    pub struct BwdParams {
        /// The forward call: its scalars and operands, of which `o` and `lse` are inputs here.
        pub fwd: FwdParams,
        /// Gradient of O, `[batch, seqlen_q, num_heads_q, head_dim_v]`, or packed.
        pub dout: View,
        /// Gradient of Q.
        pub dq: View,
        /// Gradient of K.
        pub dk: View,
        /// Gradient of V.
        pub dv: View,
        /// Gradient of the bias, `[batch, num_heads_q, seqlen_q, seqlen_k]` without the axes that the bias lacks;
        /// the query is the row and the key is dim. Broadcast axes have stride 0.
        pub dbias: View,
        /// Gradient of LSE, laid out like it; null when there is none.
        pub dlse: DevPtr<f32>,
        /// Gradient of the sinks, `[num_heads_q]`; null when not wanted.
        pub dsink: DevPtr<f32>,
        /// LSE less `score_origin` in log2 for each query row, in the workspace (`fmha/bwd.h` has the row's index);
        /// +infinity for a row without contributions.
        pub lse_log2: DevPtr<f32>,
        /// Number that is subtracted from each query row's scores, in the workspace: 0, or about LSE if LSE is so
        /// large that its rounding would change P (`fmha/row_bwd.h`).
        pub score_origin: DevPtr<f32>,
        /// `dO . O - dLSE` for each query row, in the workspace.
        pub delta: DevPtr<f32>,
        /// f32 sums of dQ in the workspace, blocks of rows in the order of the kernel's accumulators; null if dQ is
        /// not accumulated in global memory.
        pub dq_sums: DevPtr<f32>,
        /// Semaphores in the workspace, one for each block of rows of `dq_sums`. For ordered sums: the number of
        /// key blocks that have added. If the first addition is a store: 1 while it is about to store and 2 once it
        /// has. Otherwise null.
        pub dq_semaphores: DevPtr<i32>,
        /// Counters of the dynamic schedulers in the workspace, the next tile's index first.
        pub schedulers: DevPtr<i32>,
        /// Flags in the workspace for each warp of each tile: whether its dK or dV contain a non-finite number.
        /// They are followed by the main kernel's other flags and counters.
        pub non_finite: DevPtr<i32>,
        /// Number of rows of `lse_log2`, `score_origin` and `delta` between query heads.
        pub stats_head: i64,
        /// Number of rows of `lse_log2`, `score_origin` and `delta` between sequences.
        pub stats_batch: i64,
        /// 1 if the bias' gradient has a batch axis.
        pub dbias_per_batch: i32,
        /// 1 if the bias' gradient has a head axis.
        pub dbias_per_head: i32,
        /// f32 sums of the gradients of captured tensors in the workspace: the gradients one after another, and all
        /// of them once for each part of the rows.
        pub captured_sums: DevPtr<f32>,
        /// Number of elements of all gradients in `captured_sums`.
        pub captured_elems: i64,
        /// Number of copies of `captured_sums`: copy n has the sums over the n-th of equal shares of all query
        /// rows.
        pub captured_parts: i64,
    }
}

/// Most parts that one combine launch merges: their addresses are passed in the kernel's 4 KB of arguments.
pub const MAX_PARTS: usize = 128;

abi_struct! {
    /// One partial result.
    pub struct PartPointers {
        /// The part's O.
        pub o: DevPtr<Untyped>,
        /// The part's LSE, `[batch, num_heads_q, seqlen_q]`.
        pub lse: DevPtr<f32>,
    }
}

abi_struct! {
    /// Parameters of the combine kernel: partial results over the same rows.
    pub struct CombineParams {
        /// The parts, of which the first `num_parts` are used.
        pub parts: [PartPointers; MAX_PARTS],
        /// Every part's strides; `data` is unused.
        pub part: View,
        /// The combined O, `[batch, seqlen_q, num_heads_q, head_dim_v]`.
        pub o: View,
        /// The combined LSE, `[batch, num_heads_q, seqlen_q]`; null when not wanted.
        pub lse: DevPtr<f32>,
        /// Number of parts.
        pub num_parts: i32,
        /// Number of sequences.
        pub batch: i32,
        /// Number of query rows of each sequence.
        pub seqlen_q: i32,
        /// Number of heads.
        pub num_heads_q: i32,
    }
}

/// C++ text `constexpr int32_t NAME = VALUE;` of a number that host and device share.
#[must_use]
pub fn c_constant(name: &str, value: u32) -> String {
    format!("constexpr int32_t {name} = {value};\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_has_every_field_in_order_and_both_sizes() {
        let text = HeadScalars::c_definition();
        assert_eq!(
            text,
            "struct HeadScalars {\n  float* data;\n  int32_t batch;\n  int32_t head;\n};\n\
             static_assert(sizeof(HeadScalars) == 16 && alignof(HeadScalars) == 8, \
             \"HeadScalars: host and device disagree\");\n"
        );
    }

    #[test]
    fn what_cpp_has_by_itself_needs_no_definition() {
        assert_eq!([bool::c_definition(), i32::c_definition()], ["", ""]);
    }

    #[test]
    fn mask_params_resolve_to_the_band_that_the_mask_has() {
        for text in [
            "0",
            "t",
            "b",
            "t:3,2",
            "b:3,-1,2",
            "b:-1,4",
            "g:-2147483648,5",
            "g:2147483647,-2147483648",
            "t:4294967295,0",
        ] {
            let mask: MaskSpec = text.parse().unwrap();
            for (seqlen_q, seqlen_k) in [(5u32, 9u32), (9, 5), (i32::MAX as u32, 1), (1, i32::MAX as u32)] {
                let params = MaskParams::from(mask);
                let diag = i64::from(params.bottom_right) * (i64::from(seqlen_k) - i64::from(seqlen_q));
                let (least, most) = (-i64::from(seqlen_q), i64::from(seqlen_k));
                let bound = |value: i32, unbounded: i32, at: i64| {
                    if value == unbounded { at } else { (i64::from(value) + diag).clamp(least, most) }
                };
                let band = mask.band(seqlen_q, seqlen_k);
                assert_eq!(bound(params.lo, i32::MIN, least), band.lo, "{text} {seqlen_q} {seqlen_k}");
                assert_eq!(bound(params.hi, i32::MAX, most), band.hi, "{text} {seqlen_q} {seqlen_k}");
            }
        }
    }
}
