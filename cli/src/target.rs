//! Output files: checked before anything is computed, written completely, and all of them or none.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use crate::failure::Failure;
use crate::memory::room_for;

/// A file's bytes. A device or a pipe has no end that could be known beforehand, and is refused.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |error| Failure::file(path, &error);
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        let kind = if metadata.is_dir() { "a folder" } else { "a device or a pipe" };
        return Err(Failure::wrong(format!("{}: {kind}, where a file is wanted", path.display())));
    }
    let length = metadata.len();
    room_for(&path.display(), length.into())?;
    let mut bytes = Vec::new();
    // `room_for` has tried as much.
    bytes.reserve_exact(length as usize);
    // Reading one byte more shows a file that grows.
    file.take(length + 1).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// Reads a file as [`read`] does, as text.
pub(super) fn read_text(path: &Path) -> Result<String, Failure> {
    String::from_utf8(read(path)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::wrong(format!("{}: byte {at} is not UTF-8", path.display()))
    })
}

/// Refuses a path that a file of one of `kinds` (extensions; empty: any) could not be written to.
pub(super) fn check(option: &str, path: &Path, kinds: &[&str]) -> Result<(), Failure> {
    let refuse = |text: String| Err(Failure::wrong(format!("{option} {}: {text}", path.display())));
    let kind = path.extension().and_then(|kind| kind.to_str()).unwrap_or_default();
    if !kinds.is_empty() && !kinds.contains(&kind) {
        let kinds = kinds.join(" or .");
        return refuse(match kind {
            "" => format!("it has no ending, and .{kinds} is wanted"),
            kind => format!("`.{kind}` is not .{kinds}"),
        });
    }
    let folder = folder(path);
    if !folder.is_dir() {
        return refuse(format!("{} is no folder", folder.display()));
    }
    if path.exists() && !path.is_file() {
        return refuse("it is there, and is no file".to_owned());
    }
    // Gone again at once: whether a file can be made there is known only by making one.
    match tempfile::tempfile_in(folder) {
        Ok(_) => Ok(()),
        Err(error) => refuse(error.to_string()),
    }
}

/// Refuses an output that is another output or an input: the later would overwrite the earlier.
pub(super) fn distinct(outputs: &[(&str, &Path)], inputs: &[(&str, &Path)]) -> Result<(), Failure> {
    for (index, (option, path)) in outputs.iter().enumerate() {
        let mut others = outputs[..index].iter().chain(inputs);
        if let Some((other, _)) = others.find(|(_, other)| same_file(path, other)) {
            let text = format!("{option} {}: {other} is the same file", path.display());
            return Err(Failure::wrong(text));
        }
    }
    Ok(())
}

fn same_file(a: &Path, b: &Path) -> bool {
    let place = |path: &Path| {
        path.canonicalize().ok().or_else(|| Some(folder(path).canonicalize().ok()?.join(path.file_name()?)))
    };
    place(a).is_some_and(|a| Some(a) == place(b))
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A file that is written completely next to its path, and then moved there.
pub(super) struct Staged {
    file: tempfile::NamedTempFile,
    path: PathBuf,
}

impl Staged {
    pub(super) fn new(
        path: &Path,
        write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
    ) -> Result<Self, Failure> {
        let failed = |error| Failure::file(path, &error);
        let mut file = tempfile::NamedTempFile::new_in(folder(path)).map_err(failed)?;
        let mut buffered = std::io::BufWriter::new(&mut file);
        write(&mut buffered).and_then(|()| buffered.flush()).map_err(failed)?;
        drop(buffered);
        readable_as_usual(&file).map_err(failed)?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// Makes the file appear, in place of whatever was there.
    pub(super) fn publish(self) -> Result<PathBuf, Failure> {
        let Self { file, path } = self;
        file.persist(&path).map_err(|error| Failure::file(&path, &error.error))?;
        Ok(path)
    }
}

/// Makes all files appear; if one cannot, those before it are taken back and what they replaced is restored.
pub(super) fn publish(all: Vec<Staged>) -> Result<Vec<PathBuf>, Failure> {
    let mut done: Vec<(PathBuf, Option<tempfile::TempPath>)> = Vec::new();
    for staged in all {
        let path = staged.path.clone();
        // A second name keeps the old file until all is well; a file system without hard links cannot undo.
        let before = path.is_file().then(|| {
            let link = |name: &Path| std::fs::hard_link(&path, name);
            tempfile::Builder::new().make_in(folder(&path), link).ok().map(|file| file.into_parts().1)
        });
        match staged.publish() {
            Ok(path) => done.push((path, before.flatten())),
            Err(failure) => {
                for (path, before) in done.into_iter().rev() {
                    let undone = match before {
                        Some(before) => before.persist(&path).map_err(|error| error.error),
                        None => std::fs::remove_file(&path),
                    };
                    // The first failure is reported, and later ones are dropped.
                    drop(undone);
                }
                return Err(failure);
            }
        }
    }
    Ok(done.into_iter().map(|(path, _)| path).collect())
}

/// Writes text to `path`, whole or not at all.
pub(super) fn write_text(path: &Path, text: &str) -> Result<(), Failure> {
    Staged::new(path, |file| file.write_all(text.as_bytes()))?.publish().map(drop)
}

/// Gives the result the permissions of an ordinary new file; a temporary file belongs to its owner alone.
#[cfg(unix)]
fn readable_as_usual(file: &tempfile::NamedTempFile) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn readable_as_usual(_file: &tempfile::NamedTempFile) -> std::io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn staged(path: &Path, text: &str) -> Staged {
        Staged::new(path, |file| file.write_all(text.as_bytes())).unwrap()
    }

    #[test]
    fn a_write_that_fails_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("o.npy");
        let half_way = Staged::new(&path, |file| {
            file.write_all(b"half")?;
            Err(std::io::Error::other("no more"))
        });
        assert!(half_way.is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn all_files_appear_or_none_and_what_was_there_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("old"), "before").unwrap();
        // A folder at the last path, which cannot be replaced by a file.
        let list = || vec![staged(&at("old"), "after"), staged(&at("new"), "new"), staged(&at("last"), "x")];
        let blocked = list();
        std::fs::create_dir(at("last")).unwrap();
        assert!(publish(blocked).is_err());
        assert_eq!(std::fs::read_to_string(at("old")).unwrap(), "before");
        assert!(!at("new").exists());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "old and the folder");
        std::fs::remove_dir(at("last")).unwrap();
        assert_eq!(publish(list()).unwrap().len(), 3);
        assert_eq!(std::fs::read_to_string(at("old")).unwrap(), "after");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn one_file_by_two_names_is_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a"), folder.path().join("./a"));
        assert!(distinct(&[("out", &a), ("out_lse", &b)], &[]).is_err());
        std::fs::write(&a, "").unwrap();
        assert!(distinct(&[("out", &b)], &[("q", &a)]).is_err());
        assert!(distinct(&[("out", &a)], &[("q", &folder.path().join("c"))]).is_ok());
    }
}
