//! What the replica is told, written to files that `sim replay` feeds to a replica again.
//!
//! The replica's thread only hands copies over; a thread of its own takes the contents out and writes. The files are a
//! ring: each begins with the replica's state, so that each can be replayed alone, and the oldest goes when there are
//! too many. What was handed over is on its way to the file at once, so a killed process leaves all but its last moments.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use leasehold_core::recording::Recorder;
use leasehold_core::{Input, Now, Output, Replica};

/// Turns of the replica's loop that may wait to be written. Then it waits for the writer.
const WAITING: usize = 256;
/// Files that share the limit.
const PARTS: u64 = 4;

/// Where to, and how much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub folder: PathBuf,
    /// Bytes of all recordings in the folder.
    pub limit: u64,
}

struct Step {
    /// The state before it, if a file begins with it.
    state: Option<Box<Replica>>,
    now: Now,
    input: Input,
    outputs: Vec<Output>,
}

/// A recording that is being made.
#[derive(Debug)]
pub struct Tape {
    steps: Vec<Step>,
    writer: Option<(SyncSender<Vec<Step>>, JoinHandle<()>)>,
    told: Arc<Told>,
}

/// What the writer tells the replica's thread.
#[derive(Debug, Default)]
struct Told {
    /// A file is to begin: with the replica's state.
    wanted: AtomicBool,
    over: AtomicBool,
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Contents stay out of logs.
        write!(f, "Step({})", self.now)
    }
}

impl Tape {
    /// Makes the first file.
    pub fn start(settings: &Settings) -> io::Result<Tape> {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("nothing can be recorded in {}: {error}", settings.folder.display()))
        };
        std::fs::create_dir_all(&settings.folder).map_err(named)?;
        let ring = Ring::new(settings).map_err(named)?;
        let (to, from) = sync_channel(WAITING);
        let told = Arc::new(Told { wanted: AtomicBool::new(true), over: AtomicBool::new(false) });
        let (tell, folder) = (told.clone(), settings.folder.clone());
        let thread = std::thread::Builder::new().name("leasehold-record".into()).spawn(move || {
            if let Err(error) = ring.write(&from, &tell) {
                tracing::error!(%error, folder = %folder.display(), "the recording has ended: it cannot be written");
            }
            tell.over.store(true, Ordering::Relaxed);
            // Whoever still hands something over is not kept waiting.
            for _ in from {}
        })?;
        tracing::info!(folder = %settings.folder.display(), "what the replica is told is recorded, without contents");
        Ok(Tape { steps: Vec::new(), writer: Some((to, thread)), told })
    }

    /// The replica is about to be told something.
    pub fn begin(&mut self, replica: &Replica, now: Now, input: &Input) {
        if self.told.over.load(Ordering::Relaxed) {
            return;
        }
        let wanted = self.told.wanted.load(Ordering::Relaxed) && self.told.wanted.swap(false, Ordering::Relaxed);
        let state = wanted.then(|| Box::new(replica.clone()));
        self.steps.push(Step { state, now, input: input.clone(), outputs: Vec::new() });
    }

    /// What came out of it. Without this the step is one in which the replica failed.
    pub fn end(&mut self, outputs: &[Output]) {
        if let Some(step) = self.steps.last_mut() {
            step.outputs = outputs.to_vec();
        }
    }

    /// Hands over what has come.
    pub fn flush(&mut self) {
        if let Some((to, _)) = self.writer.as_ref().filter(|_| !self.steps.is_empty()) {
            // A writer that has gone has told why.
            let _ = to.send(std::mem::take(&mut self.steps));
        }
    }
}

impl Drop for Tape {
    fn drop(&mut self) {
        self.flush();
        if let Some((to, thread)) = self.writer.take() {
            drop(to);
            // It has nothing to tell that it has not logged.
            let _ = thread.join();
        }
    }
}

/// The files of this process.
#[derive(Debug)]
struct Ring {
    settings: Settings,
    /// What their names begin with.
    stem: String,
    /// Begun so far.
    begun: u64,
    /// Steps so far.
    steps: u64,
    file: BufWriter<File>,
    path: PathBuf,
    /// Bytes in the present file, and how many are enough.
    written: u64,
    enough: u64,
}

impl Ring {
    fn new(settings: &Settings) -> io::Result<Ring> {
        let ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_millis());
        let stem = format!("leasehold-{ms}-{}", std::process::id());
        let (path, file) = create(settings, &stem, 0)?;
        let settings = settings.clone();
        Ok(Ring { settings, stem, begun: 0, steps: 0, file, path, written: 0, enough: 0 })
    }

    fn write(mut self, from: &Receiver<Vec<Step>>, tell: &Told) -> io::Result<()> {
        let (mut recorder, mut bytes) = (Recorder::default(), Vec::new());
        loop {
            let steps = match from.try_recv() {
                Ok(steps) => steps,
                Err(TryRecvError::Empty) => {
                    self.file.flush()?;
                    match from.recv() {
                        Ok(steps) => steps,
                        Err(_) => return Ok(()),
                    }
                }
                Err(TryRecvError::Disconnected) => return self.file.flush(),
            };
            for Step { state, now, input, outputs } in steps {
                if let Some(replica) = state {
                    let begin = Recorder::begin(env!("CARGO_PKG_VERSION"), self.steps, &replica);
                    if !self.turn(&begin)? {
                        return self.file.flush();
                    }
                }
                bytes.clear();
                recorder.step(now, input, outputs, &mut bytes);
                self.steps += 1;
                let before = self.written < self.enough;
                self.add(&bytes)?;
                if before && self.written >= self.enough {
                    tell.wanted.store(true, Ordering::Relaxed);
                }
            }
        }
    }

    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    /// Begins the next file; whether there is room for it.
    fn turn(&mut self, begin: &[u8]) -> io::Result<bool> {
        let (part, state) = (self.settings.limit / PARTS, begin.len() as u64);
        if state > part {
            let limit = self.settings.limit;
            tracing::warn!(
                state,
                limit,
                "the recording has ended: its limit is less than four times the replica's state"
            );
            return Ok(false);
        }
        if self.begun > 0 {
            self.file.flush()?;
            (self.path, self.file) = create(&self.settings, &self.stem, self.begun)?;
        }
        self.begun += 1;
        (self.written, self.enough) = (0, part);
        self.make_room(part)?;
        self.add(begin)?;
        Ok(true)
    }

    /// Removes the oldest recordings, of whichever process, until so many bytes more are within the limit.
    fn make_room(&self, bytes: u64) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.settings.folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let ours = name.to_str().is_some_and(|n| n.starts_with("leasehold-") && n.ends_with(".record"));
            // One that has just vanished has made room.
            if let (true, Ok(about)) = (ours && entry.path() != self.path, entry.metadata()) {
                files.push((about.modified()?, entry.path(), about.len()));
            }
        }
        files.sort();
        let mut all: u64 = files.iter().map(|(_, _, len)| len).sum();
        for (_, path, len) in files {
            if all + bytes <= self.settings.limit {
                break;
            }
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => all -= len,
            }
        }
        Ok(())
    }
}

/// A file that only its owner can read.
fn create(settings: &Settings, stem: &str, number: u64) -> io::Result<(PathBuf, BufWriter<File>)> {
    let path = settings.folder.join(format!("{stem}.{number:06}.record"));
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
    Ok((path, BufWriter::with_capacity(1 << 20, file)))
}
