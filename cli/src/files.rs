//! The user's tensors: `.npy` and `.safetensors`, read whole and written whole or not at all.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fmha::{DType, Shape};
use safetensors::{Dtype, SafeTensors, View};

use crate::failure::Failure;
use crate::npy;
use crate::target::{Staged, read};

/// A tensor in memory: row-major, little-endian.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tensor {
    pub(super) dtype: DType,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: Vec<u8>,
}

impl Tensor {
    /// Values as f64, in memory order.
    pub(super) fn values(&self) -> impl Iterator<Item = f64> + '_ {
        self.bytes.chunks_exact(self.dtype.size_bytes() as usize).map(|elem| self.dtype.read(elem))
    }

    /// The logical axes of a tensor of rank 4, or of rank 3 for one sequence or packed ones. `order` is the memory
    /// order, such as `bshd`.
    pub(super) fn logical(&self, name: &str, order: &str) -> Result<Shape, Failure> {
        let axes: Vec<u64> = match self.shape.len() {
            4 => self.shape.clone(),
            3 => [1].iter().chain(&self.shape).copied().collect(),
            rank => {
                let wanted: Vec<_> = order.chars().map(String::from).collect();
                return Err(Failure::wrong(format!(
                    "{name} has rank {rank} (shape {:?}), not 4 ([{}]) or 3 ([{}])",
                    self.shape,
                    wanted.join(", "),
                    wanted[1..].join(", ")
                )));
            }
        };
        let axis = |letter: char| {
            let extent = order.find(letter).map_or(1, |at| axes[at]);
            u32::try_from(extent).map_err(|_| {
                Failure::wrong(format!("{name} has an axis of {extent}, more than {}", u32::MAX))
            })
        };
        Ok(Shape { batch: axis('b')?, seq: axis('s')?, head: axis('h')?, dim: axis('d')? })
    }
}

/// Reads a `.npy` file; `raw` is the user's type for elements that the file calls raw bytes.
pub(super) fn read_npy(path: &Path, raw: Option<DType>) -> Result<Tensor, Failure> {
    npy::decode(read(path)?, raw).map_err(|text| Failure::wrong(format!("{}: {text}", path.display())))
}

/// A `.safetensors` file in memory.
pub(super) struct Archive {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Archive {
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let archive = Self { path: path.to_owned(), bytes: read(path)? };
        archive.parse()?;
        Ok(archive)
    }

    fn parse(&self) -> Result<SafeTensors<'_>, Failure> {
        SafeTensors::deserialize(&self.bytes).map_err(|error| {
            Failure::wrong(format!("{}: no .safetensors file: {error}", self.path.display()))
        })
    }

    /// Whether a tensor has this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.parse().is_ok_and(|tensors| tensors.names().contains(&name))
    }

    pub(super) fn tensor(&self, name: &str) -> Result<Tensor, Failure> {
        let tensors = self.parse()?;
        let Ok(view) = tensors.tensor(name) else {
            let mut names = tensors.names();
            names.sort_unstable();
            return Err(Failure::wrong(format!(
                "{}: no tensor `{name}` among its {} ({})",
                self.path.display(),
                names.len(),
                names.join(", ")
            )));
        };
        let dtype = match view.dtype() {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::Bf16,
            Dtype::F8_E4M3 => DType::E4m3Fn,
            Dtype::F8_E5M2 => DType::E5m2,
            Dtype::F8_E4M3FNUZ => DType::E4m3Fnuz,
            Dtype::F8_E5M2FNUZ => DType::E5m2Fnuz,
            other => {
                return Err(Failure::wrong(format!(
                    "{}: dtype {other:?} of `{name}` is no number type here ({})",
                    self.path.display(),
                    DType::ALL.map(DType::name).join(", ")
                )));
            }
        };
        let shape = view.shape().iter().map(|&extent| extent as u64).collect();
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(view.data().len())
            .map_err(|error| Failure::wrong(format!("{name} of {} bytes: {error}", view.data().len())))?;
        bytes.extend_from_slice(view.data());
        Ok(Tensor { dtype, shape, bytes })
    }
}

/// Refuses a type that [`stage_npy`] could not write, before anything is computed.
pub(super) fn check_npy_dtype(path: &Path, dtype: DType) -> Result<(), Failure> {
    match dtype {
        DType::F32 | DType::F16 => Ok(()),
        other => Err(Failure::wrong(format!(
            "{}: the .npy format has no {other}: write .safetensors, or choose --prec-o fp32",
            path.display()
        ))),
    }
}

/// A `.npy` file: f32 or f16.
pub(super) fn stage_npy(path: &Path, tensor: &Tensor) -> Result<Staged, Failure> {
    check_npy_dtype(path, tensor.dtype)?;
    let header = npy::header(tensor).unwrap_or_default();
    Staged::new(path, |file| {
        file.write_all(&header)?;
        file.write_all(&tensor.bytes)
    })
}

/// A tensor in the form for the crate that writes it.
struct Stored<'a> {
    tensor: &'a Tensor,
    extents: Vec<usize>,
}

impl View for Stored<'_> {
    fn dtype(&self) -> Dtype {
        match self.tensor.dtype {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::Bf16 => Dtype::BF16,
            DType::E4m3Fn => Dtype::F8_E4M3,
            DType::E5m2 => Dtype::F8_E5M2,
            DType::E4m3Fnuz => Dtype::F8_E4M3FNUZ,
            DType::E5m2Fnuz => Dtype::F8_E5M2FNUZ,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.extents
    }

    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        self.tensor.bytes.as_slice().into()
    }

    fn data_len(&self) -> usize {
        self.tensor.bytes.len()
    }
}

/// A `.safetensors` file.
pub(super) fn stage_safetensors(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<Staged, Failure> {
    let stored = tensors.iter().map(|(name, tensor)| {
        let extents = tensor.shape.iter().map(|&extent| extent as usize).collect();
        (name.as_str(), Stored { tensor, extents })
    });
    let bytes = safetensors::serialize(stored, None)
        .map_err(|error| Failure::wrong(format!("{}: {error}", path.display())))?;
    Staged::new(path, |file| file.write_all(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(dtype: DType) -> Tensor {
        let bytes = (0..24 * dtype.size_bytes()).map(|i| i as u8).collect();
        Tensor { dtype, shape: vec![2, 3, 4], bytes }
    }

    #[test]
    fn what_is_written_reads_back_in_both_formats() {
        let folder = tempfile::tempdir().unwrap();
        for dtype in DType::ALL {
            let (npy, archive) = (folder.path().join("t.npy"), folder.path().join("t.safetensors"));
            let tensors = BTreeMap::from([("t".to_owned(), tensor(dtype))]);
            stage_safetensors(&archive, &tensors).unwrap().publish().unwrap();
            assert_eq!(Archive::open(&archive).unwrap().tensor("t").unwrap(), tensor(dtype));
            if let Ok(staged) = stage_npy(&npy, &tensor(dtype)) {
                staged.publish().unwrap();
                assert_eq!(read_npy(&npy, None).unwrap(), tensor(dtype));
            } else {
                assert!(!matches!(dtype, DType::F32 | DType::F16), "{dtype}");
            }
        }
    }
}
