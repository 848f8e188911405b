//! Host memory for tests: aligned, next to an unmapped page, or huge and sparse.

use std::ops::{Deref, DerefMut};

use fmha_core::{Error, Result};

/// Where a tensor's bytes lie in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Between margins of 256 bytes and more, filled with NaN.
    #[default]
    Margins,
    /// Directly before an unmapped page: one byte past the end faults.
    EndsAtUnmapped,
    /// Directly after an unmapped page, so that reading one byte before the start faults.
    BeginsAtUnmapped,
    /// Reserved, and committed page by page on access; untouched parts are zeros.
    Sparse,
}

fn refused(what: String, text: &dyn ToString) -> Error {
    Error::System { what, text: text.to_string() }
}

/// Owned bytes, 256-byte aligned unless they end at an unmapped page.
pub struct Bytes(Storage);

enum Storage {
    Blocks {
        blocks: Vec<Block>,
        len: usize,
    },
    #[cfg(any(unix, windows))]
    Mapped(mapped::Mapped),
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(256))]
struct Block([u8; 256]);

impl Bytes {
    /// Allocates `len` bytes set to `fill`.
    ///
    /// # Errors
    /// The size, if the system has too little memory.
    pub fn filled(len: usize, fill: u8) -> Result<Self> {
        let mut blocks = Vec::new();
        let count = len.div_ceil(256);
        blocks
            .try_reserve_exact(count)
            .map_err(|_| refused(format!("{len} bytes of host memory"), &"the system has not so much"))?;
        blocks.resize(count, Block([fill; 256]));
        Ok(Self(Storage::Blocks { blocks, len }))
    }

    /// Allocates `len` bytes set to `fill` that end directly before an unmapped page, or begin after one.
    ///
    /// # Errors
    /// What the system said; always on systems other than Unix and Windows.
    pub fn beside_unmapped(len: usize, fill: u8, at_end: bool) -> Result<Self> {
        #[cfg(any(unix, windows))]
        {
            let mut mapped = mapped::Mapped::guarded(len, at_end)?;
            mapped.bytes_mut().fill(fill);
            Ok(Self(Storage::Mapped(mapped)))
        }
        #[cfg(not(any(unix, windows)))]
        {
            let _ = (len, fill, at_end);
            Err(refused(format!("{len} bytes beside an unmapped page"), &"this system has no mmap"))
        }
    }

    /// Allocates `len` zeros that use memory only where they are accessed.
    ///
    /// # Errors
    /// What the system said; always on systems without `mmap`.
    pub fn sparse(len: usize) -> Result<Self> {
        #[cfg(unix)]
        {
            Ok(Self(Storage::Mapped(mapped::Mapped::reserved(len)?)))
        }
        #[cfg(not(unix))]
        {
            Err(refused(format!("{len} bytes reserved"), &"this system has no mmap"))
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Storage::Blocks { blocks, len } => &bytemuck::cast_slice(blocks)[..*len],
            #[cfg(any(unix, windows))]
            Storage::Mapped(mapped) => mapped.bytes(),
        }
    }
}

impl DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Storage::Blocks { blocks, len } => &mut bytemuck::cast_slice_mut(blocks)[..*len],
            #[cfg(any(unix, windows))]
            Storage::Mapped(mapped) => mapped.bytes_mut(),
        }
    }
}

#[cfg(unix)]
mod mapped {
    use std::ffi::c_void;
    use std::ptr;

    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
    use rustix::param::page_size;

    use super::{Result, refused};

    /// A private anonymous mapping, and the part of it that holds a tensor.
    pub(super) struct Mapped {
        map: *mut c_void,
        map_len: usize,
        first: usize,
        len: usize,
    }

    // SAFETY: the mapping is private to its owner, as a Vec's memory is.
    unsafe impl Send for Mapped {}
    // SAFETY: the mapping is private to its owner, as a Vec's memory is; shared access only reads.
    unsafe impl Sync for Mapped {}

    impl Mapped {
        fn map(map_len: usize, flags: MapFlags) -> Result<*mut c_void> {
            // SAFETY: no address is asked for, so no existing mapping changes.
            unsafe {
                mmap_anonymous(
                    ptr::null_mut(),
                    map_len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::PRIVATE | flags,
                )
            }
            .map_err(|error| refused(format!("mmap of {map_len} bytes"), &error))
        }

        pub(super) fn guarded(len: usize, at_end: bool) -> Result<Self> {
            let page = page_size();
            let body = len.max(1).next_multiple_of(page);
            let map_len = body + 2 * page;
            let map = Self::map(map_len, MapFlags::empty())?;
            let first = if at_end { page + body - len } else { page };
            let mapped = Self { map, map_len, first, len };
            for at in [0, page + body] {
                // SAFETY: both pages lie in the mapping made above; nothing refers to them.
                unsafe { mprotect(map.byte_add(at), page, MprotectFlags::empty()) }
                    .map_err(|error| refused(format!("mprotect of {page} bytes"), &error))?;
            }
            Ok(mapped)
        }

        pub(super) fn reserved(len: usize) -> Result<Self> {
            let map_len = len.max(1).next_multiple_of(page_size());
            let map = Self::map(map_len, MapFlags::NORESERVE)?;
            Ok(Self { map, map_len, first: 0, len })
        }

        pub(super) fn bytes(&self) -> &[u8] {
            // SAFETY: `first .. first + len` is mapped readable and zero-initialised.
            unsafe { std::slice::from_raw_parts(self.map.cast::<u8>().add(self.first), self.len) }
        }

        pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: `first .. first + len` is mapped readable and zero-initialised, and writable; the
            // borrow is exclusive.
            unsafe { std::slice::from_raw_parts_mut(self.map.cast::<u8>().add(self.first), self.len) }
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: this is the whole mapping made in `map`, and no borrow outlives its owner. A
            // failure leaves it mapped, which is a leak and nothing worse.
            let _ = unsafe { munmap(self.map, self.map_len) };
        }
    }
}

#[cfg(windows)]
mod mapped {
    use std::ffi::c_void;
    use std::{io, ptr};

    use windows_sys::Win32::System::Memory::{
        MEM_COMMIT, MEM_RELEASE, MEM_RESERVE, PAGE_NOACCESS, PAGE_READWRITE, VirtualAlloc, VirtualFree,
        VirtualProtect,
    };

    use super::{Result, refused};

    /// Multiple of the page size. Pages have 4 KiB on x86-64 and AArch64, and a larger multiple serves other sizes.
    const PAGE: usize = 1 << 16;

    /// Pages of this process, and the part of them that holds a tensor.
    pub(super) struct Mapped {
        map: *mut c_void,
        first: usize,
        len: usize,
    }

    // SAFETY: the pages are private to their owner, as a Vec's memory is.
    unsafe impl Send for Mapped {}
    // SAFETY: the pages are private to their owner, as a Vec's memory is; shared access only reads.
    unsafe impl Sync for Mapped {}

    impl Mapped {
        pub(super) fn guarded(len: usize, at_end: bool) -> Result<Self> {
            let body = len.max(1).next_multiple_of(PAGE);
            let map_len = body + 2 * PAGE;
            let system =
                |what: &str| refused(format!("{what} of {map_len} bytes"), &io::Error::last_os_error());
            // SAFETY: no address is asked for, so no existing pages change.
            let map = unsafe { VirtualAlloc(ptr::null(), map_len, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE) };
            if map.is_null() {
                return Err(system("VirtualAlloc"));
            }
            let mapped = Self { map, first: if at_end { PAGE + body - len } else { PAGE }, len };
            for at in [0, PAGE + body] {
                let mut before = 0;
                // SAFETY: both ranges lie in the pages made above; nothing refers to them.
                if unsafe { VirtualProtect(map.byte_add(at), PAGE, PAGE_NOACCESS, &raw mut before) } == 0 {
                    return Err(system("VirtualProtect"));
                }
            }
            Ok(mapped)
        }

        pub(super) fn bytes(&self) -> &[u8] {
            // SAFETY: `first .. first + len` is readable, and zeros at first.
            unsafe { std::slice::from_raw_parts(self.map.cast::<u8>().add(self.first), self.len) }
        }

        pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: `first .. first + len` is readable, and zeros at first, and writable; the borrow is
            // exclusive.
            unsafe { std::slice::from_raw_parts_mut(self.map.cast::<u8>().add(self.first), self.len) }
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: these are all pages of one VirtualAlloc, and no borrow outlives their owner.
            unsafe { VirtualFree(self.map, 0, MEM_RELEASE) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_placement_holds_its_bytes() {
        for len in [0, 1, 255, 256, 4096, 5000] {
            assert!(Bytes::filled(len, 7).unwrap().iter().filter(|&&byte| byte == 7).count() == len);
            for at_end in [false, true] {
                let bytes = Bytes::beside_unmapped(len, 9, at_end).unwrap();
                assert_eq!((bytes.len(), bytes.iter().all(|&byte| byte == 9)), (len, true));
            }
        }
        if cfg!(windows) {
            return println!("absent: sparse memory, which Windows refuses");
        }
        let mut sparse = Bytes::sparse(1 << 34).unwrap();
        sparse[(1 << 34) - 1] = 3;
        assert_eq!((sparse[0], sparse[(1 << 34) - 1]), (0, 3));
    }
}
