//! Search for HIP's libraries.

use std::path::PathBuf;

use fmha_core::Error;
use libloading::Library;

use super::sys::{Hip, Hiprtc};

/// File names of the library. The unversioned name comes first, since a development link shows which version the
/// user wants.
const HIP: [&str; 4] = ["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"];
const HIPRTC: [&str; 4] = ["libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5"];

/// Names of ROCTx: rocprofiler-sdk's library, then roctracer's.
const ROCTX: [&str; 5] = [
    "librocprofiler-sdk-roctx.so",
    "librocprofiler-sdk-roctx.so.1",
    "librocprofiler-sdk-roctx.so.0",
    "libroctx64.so",
    "libroctx64.so.4",
];

/// Opens libamdhip64 from the loader's path, then `$ROCM_PATH/lib`, then `/opt/rocm/lib`.
///
/// # Errors
/// [`Error::NoDevice`] with every name that was tried and the loader's message for it.
pub(crate) fn hip() -> Result<Hip, Error> {
    first(&system(&HIP), Hip::resolve)
}

/// Finds libhiprtc in the folders where [`hip`] looks.
///
/// # Errors
/// As [`hip`].
pub(crate) fn hiprtc() -> Result<Hiprtc, Error> {
    first(&system(&HIPRTC), Hiprtc::resolve)
}

/// Paths to search for ROCTx, in the folders used for HIP.
pub(crate) fn roctx() -> Vec<PathBuf> {
    system(&ROCTX)
}

/// Opens libamdhip64 from these paths only.
///
/// # Errors
/// As [`hip`].
pub(crate) fn hip_at(places: &[PathBuf]) -> Result<Hip, Error> {
    first(places, Hip::resolve)
}

/// Opens libhiprtc, the emulator's, from these paths only.
#[cfg(test)]
pub(crate) fn hiprtc_at(places: &[PathBuf]) -> Result<Hiprtc, Error> {
    first(places, Hiprtc::resolve)
}

fn system(names: &[&str]) -> Vec<PathBuf> {
    let rocm = std::env::var_os("ROCM_PATH").map(PathBuf::from);
    let folders = rocm.into_iter().chain([PathBuf::from("/opt/rocm")]).map(|root| root.join("lib"));
    let bare = names.iter().map(PathBuf::from);
    bare.chain(folders.flat_map(|folder| names.iter().map(move |name| folder.join(name)))).collect()
}

fn first<T>(
    places: &[PathBuf],
    resolve: impl Fn(Library) -> Result<T, Vec<&'static str>>,
) -> Result<T, Error> {
    let mut tried = Vec::new();
    for place in places {
        // SAFETY: HIP's libraries run no code at load that this process could violate the terms of.
        match unsafe { Library::new(place) } {
            Ok(library) => match resolve(library) {
                Ok(table) => return Ok(table),
                Err(missing) => tried.push(format!("{} lacks {}", place.display(), missing.join(", "))),
            },
            Err(error) => tried.push(format!("{} ({error})", place.display())),
        }
    }
    Err(Error::NoDevice(format!("no HIP library could be opened; tried {}", tried.join("; "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_library_gives_every_name_that_was_tried() {
        let places = [PathBuf::from("/nowhere/libamdhip64.so"), PathBuf::from("/nowhere/libamdhip64.so.7")];
        let error = hip_at(&places).err().map(|error| error.to_string()).unwrap_or_default();
        for place in &places {
            assert!(error.contains(&place.display().to_string()), "{error}");
        }
    }

    #[test]
    fn an_incomplete_library_is_refused_with_what_it_lacks() {
        // libc opens as a library, but has none of HIP's functions.
        let error =
            hip_at(&[PathBuf::from("libc.so.6")]).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("libc.so.6 lacks hipInit, "), "{error}");
    }

    #[test]
    fn the_search_goes_from_the_loader_to_opt_rocm() {
        let places = system(&HIP);
        assert_eq!(places[0], PathBuf::from("libamdhip64.so"));
        assert!(places.contains(&PathBuf::from("/opt/rocm/lib/libamdhip64.so.6")));
    }
}
