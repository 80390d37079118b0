//! The disk as the store sees it: the C library's functions, defined here, so that everything in this
//! process goes through them.
//!
//! What is done to files below one folder is recorded in order, as long as somebody records, and can be
//! made to fail. Everything else goes to the system unseen. The functions call the system directly;
//! they are for Linux with glibc, where `std` and (by its feature) `rustix` use these very names.
#![allow(unsafe_code, reason = "symbols of the C library are defined, and raw system calls made")]

use std::collections::HashMap;
use std::ffi::CStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{c_char, c_int, c_void, iovec, mode_t, off_t, size_t, ssize_t};

use crate::trace::{Note, Op};

static RECORDING: AtomicBool = AtomicBool::new(false);
static RECORDER: Mutex<Option<Recorder>> = Mutex::new(None);

/// Which calls a [`Fault`] counts and hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What changes files or names.
    Write,
    Sync,
    Any,
}

/// Calls that fail.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub kind: Kind,
    /// So many calls of that kind still work.
    pub after: u64,
    /// And so many fail then.
    pub times: u64,
    pub errno: i32,
    /// The first that fails writes half of what it was given.
    pub short: bool,
    /// From then on nothing at all reaches the disk: the process is as good as dead.
    pub dead: bool,
}

#[derive(Default)]
struct Recorder {
    root: Vec<u8>,
    ops: Vec<Op>,
    /// Device and inode of what is open or has a name, and its number in the trace.
    files: HashMap<(u64, u64), u32>,
    folders: HashMap<Vec<u8>, u32>,
    next: u32,
    fault: Option<Fault>,
    hits: u64,
}

fn lock() -> MutexGuard<'static, Option<Recorder>> {
    RECORDER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins to record what happens below a folder. What is in it already is durable.
///
/// # Errors
/// If the folder cannot be read.
pub fn start(root: &Path) -> std::io::Result<()> {
    let mut recorder = Recorder { root: root.as_os_str().as_bytes().to_vec(), next: 1, ..Recorder::default() };
    recorder.folders.insert(recorder.root.clone(), 0);
    if let Some(id) = identity_of(root.as_os_str().as_bytes()) {
        recorder.files.insert(id, 0);
    }
    recorder.load(root, 0)?;
    *lock() = Some(recorder);
    RECORDING.store(true, Ordering::SeqCst);
    Ok(())
}

/// Ends it and gives what was recorded.
pub fn stop() -> Vec<Op> {
    RECORDING.store(false, Ordering::SeqCst);
    lock().take().map(|r| r.ops).unwrap_or_default()
}

/// Says something at this point of the trace.
pub fn note(note: Note) {
    if let Some(recorder) = lock().as_mut() {
        recorder.ops.push(Op::Note(note));
    }
}

/// Calls fail from now on as told; `None` mends the disk.
pub fn fault(fault: Option<Fault>) {
    if let Some(recorder) = lock().as_mut() {
        recorder.fault = fault;
        recorder.hits = 0;
    }
}

/// Calls that have failed by order.
pub fn hits() -> u64 {
    lock().as_ref().map_or(0, |r| r.hits)
}

/// No more calls fail.
pub fn mend() {
    if let Some(recorder) = lock().as_mut() {
        recorder.fault = None;
    }
}

/// What is to become of one call.
enum Fate {
    Work,
    Fail(i32),
    Short,
}

impl Recorder {
    fn fate(&mut self, kind: Kind) -> Fate {
        let Some(fault) = &mut self.fault else { return Fate::Work };
        if fault.kind != Kind::Any && fault.kind != kind && !(fault.dead && self.hits > 0) {
            return Fate::Work;
        }
        if fault.after > 0 {
            fault.after -= 1;
            return Fate::Work;
        }
        if !fault.dead {
            if fault.times == 0 {
                return Fate::Work;
            }
            fault.times -= 1;
        }
        self.hits += 1;
        match fault.short && self.hits == 1 {
            true => Fate::Short,
            false => Fate::Fail(fault.errno),
        }
    }

    fn is_below(&self, path: &[u8]) -> bool {
        path.strip_prefix(&self.root[..]).is_some_and(|rest| rest.first() == Some(&b'/'))
    }

    /// Folder and name of a path below the root.
    fn place(&self, path: &[u8]) -> Option<(u32, Vec<u8>)> {
        let at = path.iter().rposition(|b| *b == b'/')?;
        Some((*self.folders.get(&path[..at])?, path[at + 1..].to_vec()))
    }

    /// Enters what is in a folder.
    fn load(&mut self, path: &Path, dir: u32) -> std::io::Result<()> {
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            let (path, folder) = (entry.path(), entry.file_type()?.is_dir());
            let text = path.as_os_str().as_bytes();
            let Some(id) = identity_of(text) else { continue };
            let file = self.number(id);
            self.ops.push(Op::Make { dir, name: entry.file_name().as_bytes().to_vec(), file, folder });
            if folder {
                self.folders.insert(text.to_vec(), file);
                self.load(&path, file)?;
            } else {
                self.ops.push(Op::Write { file, at: 0, data: std::fs::read(&path)? });
                self.ops.push(Op::Sync { file, ok: true });
            }
        }
        self.ops.push(Op::Sync { file: dir, ok: true });
        Ok(())
    }

    fn number(&mut self, id: (u64, u64)) -> u32 {
        let number = self.next;
        self.next += 1;
        self.files.insert(id, number);
        number
    }
}

fn failed(errno: i32) -> c_int {
    // SAFETY: the address is this thread's own error number.
    unsafe { *libc::__errno_location() = errno };
    -1
}

fn identity(stat: &libc::stat64) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn identity_of(path: &[u8]) -> Option<(u64, u64)> {
    let mut text = path.to_vec();
    text.push(0);
    // SAFETY: the path ends in a zero, and the struct is plain numbers that the call fills.
    unsafe {
        let mut stat: libc::stat64 = std::mem::zeroed();
        (libc::lstat64(text.as_ptr().cast(), &mut stat) == 0).then(|| identity(&stat))
    }
}

fn stat(fd: c_int) -> Option<libc::stat64> {
    // SAFETY: plain numbers that the call fills.
    unsafe {
        let mut stat: libc::stat64 = std::mem::zeroed();
        (libc::fstat64(fd, &mut stat) == 0).then_some(stat)
    }
}

/// The recorder with the number of an open file or folder, if it is one that is recorded.
fn recorded(fd: c_int) -> Option<(MutexGuard<'static, Option<Recorder>>, u32)> {
    if !RECORDING.load(Ordering::Relaxed) {
        return None;
    }
    let stat = stat(fd)?;
    if !matches!(stat.st_mode & libc::S_IFMT, libc::S_IFREG | libc::S_IFDIR) {
        return None;
    }
    let guard = lock();
    let number = *guard.as_ref()?.files.get(&identity(&stat))?;
    Some((guard, number))
}

/// The recorder, if a path is below its root.
fn below(path: *const c_char) -> Option<(MutexGuard<'static, Option<Recorder>>, Vec<u8>)> {
    if !RECORDING.load(Ordering::Relaxed) || path.is_null() {
        return None;
    }
    // SAFETY: whoever calls the C library gives it a path that ends in a zero.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes().to_vec();
    let guard = lock();
    guard.as_ref()?.is_below(&path).then_some((guard, path))
}

macro_rules! system {
    ($number:ident $(, $argument:expr)*) => {
        // SAFETY: the arguments are those that the C function of this name was given.
        unsafe { libc::syscall(libc::$number $(, $argument)*) }
    };
}

fn open_at(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let changes = flags & (libc::O_CREAT | libc::O_TRUNC) != 0;
    let Some((mut guard, text)) = (if changes { below(path) } else { None }) else {
        return system!(SYS_openat, dir, path, flags, mode) as c_int;
    };
    let before = identity_of(&text);
    let Some(recorder) = guard.as_mut() else { return failed(libc::EIO) };
    let makes = before.is_none() && flags & libc::O_CREAT != 0;
    if makes && let Fate::Fail(errno) = recorder.fate(Kind::Write) {
        return failed(errno);
    }
    let fd = system!(SYS_openat, dir, path, flags, mode) as c_int;
    let Some(stat) = (if fd >= 0 { stat(fd) } else { None }) else { return fd };
    if makes {
        if let Some((dir, name)) = recorder.place(&text) {
            let file = recorder.number(identity(&stat));
            recorder.ops.push(Op::Make { dir, name, file, folder: false });
        }
    } else if flags & libc::O_TRUNC != 0
        && let Some(file) = recorder.files.get(&identity(&stat))
    {
        recorder.ops.push(Op::Resize { file: *file, len: 0 });
    }
    fd
}

fn write_with(
    fd: c_int,
    len: usize,
    bytes: impl Fn(usize) -> Vec<u8>,
    call: impl Fn(usize) -> ssize_t,
    at: Option<off_t>,
) -> ssize_t {
    let Some((mut guard, file)) = recorded(fd) else { return call(len) };
    let Some(recorder) = guard.as_mut() else { return call(len) };
    let len = match recorder.fate(Kind::Write) {
        Fate::Work => len,
        Fate::Short if len > 1 => len / 2,
        Fate::Short => return failed(libc::ENOSPC) as ssize_t,
        Fate::Fail(errno) => return failed(errno) as ssize_t,
    };
    let written = call(len);
    if written > 0 {
        let at = at.unwrap_or_else(|| {
            // After the write, so that it is right for files that are appended to.
            let end = system!(SYS_lseek, fd, 0, libc::SEEK_CUR) as off_t;
            end - written as off_t
        });
        recorder.ops.push(Op::Write { file, at: at as u64, data: bytes(written as usize) });
    }
    written
}

fn copy(buffer: *const c_void, len: usize) -> Vec<u8> {
    // SAFETY: the system has just read that many bytes from there.
    unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), len) }.to_vec()
}

fn vector(parts: *const iovec, count: c_int) -> (usize, Vec<u8>) {
    // SAFETY: whoever calls the C library gives it so many parts.
    let parts = unsafe { std::slice::from_raw_parts(parts, count.max(0) as usize) };
    let bytes: Vec<u8> = parts.iter().flat_map(|p| copy(p.iov_base, p.iov_len)).collect();
    (bytes.len(), bytes)
}

fn sync_with(fd: c_int, call: impl Fn() -> c_int) -> c_int {
    let Some((mut guard, file)) = recorded(fd) else { return call() };
    let Some(recorder) = guard.as_mut() else { return call() };
    if let Fate::Fail(errno) = recorder.fate(Kind::Sync) {
        // A dead process asks for nothing any more.
        if recorder.fault.is_none_or(|f| !f.dead) {
            recorder.ops.push(Op::Sync { file, ok: false });
        }
        return failed(errno);
    }
    // The system need not do it: what counts is what the trace says.
    recorder.ops.push(Op::Sync { file, ok: true });
    0
}

fn resize_with(fd: c_int, len: off_t) -> c_int {
    let call = || system!(SYS_ftruncate, fd, len) as c_int;
    let Some((mut guard, file)) = recorded(fd) else { return call() };
    let Some(recorder) = guard.as_mut() else { return call() };
    if let Fate::Fail(errno) = recorder.fate(Kind::Write) {
        return failed(errno);
    }
    let result = call();
    if result == 0 {
        recorder.ops.push(Op::Resize { file, len: len as u64 });
    }
    result
}

fn name_with(path: *const c_char, call: impl Fn() -> c_int, op: impl Fn(&mut Recorder, &[u8]) -> Option<Op>) -> c_int {
    let Some((mut guard, text)) = below(path) else { return call() };
    let Some(recorder) = guard.as_mut() else { return call() };
    if let Fate::Fail(errno) = recorder.fate(Kind::Write) {
        return failed(errno);
    }
    let result = call();
    if result == 0 {
        let op = op(recorder, &text);
        recorder.ops.extend(op);
    }
    result
}

fn rename_with(from: *const c_char, to: *const c_char, call: impl Fn() -> c_int) -> c_int {
    let target = below(to).map(|(_, path)| path);
    name_with(from, call, |r, from| Some(Op::Rename { from: r.place(from)?, to: r.place(target.as_deref()?)? }))
}

fn remove_with(path: *const c_char, call: impl Fn() -> c_int) -> c_int {
    name_with(path, call, |r, path| {
        let (dir, name) = r.place(path)?;
        Some(Op::Remove { dir, name })
    })
}

macro_rules! defined {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty $body:block)*) => {
        $(
            /// The C library's function of this name.
            // SAFETY: the signature is the C library's; for a variadic one, that of its callers.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($argument: $type),*) -> $result $body
        )*
    };
}

defined! {
    fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int { open_at(libc::AT_FDCWD, path, flags, mode) }
    fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int { open_at(libc::AT_FDCWD, path, flags, mode) }
    fn openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int { open_at(dir, path, flags, mode) }
    fn openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int { open_at(dir, path, flags, mode) }
    fn write(fd: c_int, buffer: *const c_void, len: size_t) -> ssize_t {
        write_with(fd, len, |n| copy(buffer, n), |n| system!(SYS_write, fd, buffer, n) as ssize_t, None)
    }
    fn pwrite(fd: c_int, buffer: *const c_void, len: size_t, at: off_t) -> ssize_t {
        write_with(fd, len, |n| copy(buffer, n), |n| system!(SYS_pwrite64, fd, buffer, n, at) as ssize_t, Some(at))
    }
    fn pwrite64(fd: c_int, buffer: *const c_void, len: size_t, at: off_t) -> ssize_t { pwrite(fd, buffer, len, at) }
    fn writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
        if !RECORDING.load(Ordering::Relaxed) || recorded(fd).is_none() {
            return system!(SYS_writev, fd, parts, count) as ssize_t;
        }
        let (len, bytes) = vector(parts, count);
        let call = |n: usize| system!(SYS_write, fd, bytes.as_ptr(), n) as ssize_t;
        write_with(fd, len, |n| bytes[..n].to_vec(), call, None)
    }
    fn fsync(fd: c_int) -> c_int { sync_with(fd, || system!(SYS_fsync, fd) as c_int) }
    fn fdatasync(fd: c_int) -> c_int { sync_with(fd, || system!(SYS_fdatasync, fd) as c_int) }
    fn ftruncate(fd: c_int, len: off_t) -> c_int { resize_with(fd, len) }
    fn ftruncate64(fd: c_int, len: off_t) -> c_int { resize_with(fd, len) }
    fn rename(from: *const c_char, to: *const c_char) -> c_int {
        let dir = libc::AT_FDCWD;
        rename_with(from, to, || system!(SYS_renameat2, dir, from, dir, to, 0) as c_int)
    }
    fn renameat(a: c_int, from: *const c_char, b: c_int, to: *const c_char) -> c_int {
        rename_with(from, to, || system!(SYS_renameat2, a, from, b, to, 0) as c_int)
    }
    fn renameat2(a: c_int, from: *const c_char, b: c_int, to: *const c_char, flags: u32) -> c_int {
        rename_with(from, to, || system!(SYS_renameat2, a, from, b, to, flags) as c_int)
    }
    fn unlink(path: *const c_char) -> c_int {
        remove_with(path, || system!(SYS_unlinkat, libc::AT_FDCWD, path, 0) as c_int)
    }
    fn unlinkat(dir: c_int, path: *const c_char, flags: c_int) -> c_int {
        remove_with(path, || system!(SYS_unlinkat, dir, path, flags) as c_int)
    }
    fn rmdir(path: *const c_char) -> c_int {
        remove_with(path, || system!(SYS_unlinkat, libc::AT_FDCWD, path, libc::AT_REMOVEDIR) as c_int)
    }
    fn mkdir(path: *const c_char, mode: mode_t) -> c_int {
        name_with(path, || system!(SYS_mkdirat, libc::AT_FDCWD, path, mode) as c_int, |r, path| {
            let (dir, name) = r.place(path)?;
            let file = r.number(identity_of(path)?);
            r.folders.insert(path.to_vec(), file);
            Some(Op::Make { dir, name, file, folder: true })
        })
    }
}
