//! What the replica is told, written to a file that `sim replay` feeds to a replica again.
//!
//! The replica's thread only hands copies over; a thread of its own takes the contents out and writes. A recording
//! begins with the process and ends with it, or at the limit: a later beginning would need the replica's state. What
//! was handed over is on its way to the file at once, so a killed process leaves all but its last moments.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use leasehold_core::recording::Recorder;
use leasehold_core::{Config, Input, Now, Output};

/// Turns of the replica's loop that may wait to be written. Then it waits for the writer.
const WAITING: usize = 256;

/// Where to, and how much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub folder: PathBuf,
    /// Bytes.
    pub limit: u64,
}

struct Step {
    now: Now,
    input: Input,
    outputs: Vec<Output>,
}

/// A recording that is being made.
#[derive(Debug)]
pub struct Tape {
    steps: Vec<Step>,
    writer: Option<(SyncSender<Vec<Step>>, JoinHandle<()>)>,
    over: Arc<AtomicBool>,
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Contents stay out of logs.
        write!(f, "Step({})", self.now)
    }
}

impl Tape {
    /// Makes the file, which only its owner can read.
    pub fn start(settings: &Settings, config: &Config, seed: [u8; 32]) -> io::Result<Tape> {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("nothing can be recorded in {}: {error}", settings.folder.display()))
        };
        std::fs::create_dir_all(&settings.folder).map_err(named)?;
        let ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_millis());
        let path = settings.folder.join(format!("leasehold-{ms}-{}.record", std::process::id()));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(named)?;
        let begin = Recorder::begin(env!("CARGO_PKG_VERSION"), config, seed);
        let (to, from) = sync_channel(WAITING);
        let over = Arc::new(AtomicBool::new(false));
        let (told, limit, shown) = (over.clone(), settings.limit, path.clone());
        let thread = std::thread::Builder::new().name("leasehold-record".into()).spawn(move || {
            if let Err(error) = write(file, &begin, &from, limit, &shown, &told) {
                told.store(true, Ordering::Relaxed);
                tracing::error!(%error, path = %shown.display(), "the recording has ended: it cannot be written");
            }
            // Whoever still hands something over is not kept waiting.
            for _ in from {}
        })?;
        tracing::info!(path = %path.display(), "what the replica is told is recorded, without contents");
        Ok(Tape { steps: Vec::new(), writer: Some((to, thread)), over })
    }

    /// The replica is about to be told something.
    pub fn begin(&mut self, now: Now, input: &Input) {
        if !self.over.load(Ordering::Relaxed) {
            self.steps.push(Step { now, input: input.clone(), outputs: Vec::new() });
        }
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

fn write(
    file: File,
    begin: &[u8],
    from: &Receiver<Vec<Step>>,
    limit: u64,
    path: &Path,
    over: &AtomicBool,
) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, file);
    let mut recorder = Recorder::default();
    file.write_all(begin)?;
    let (mut written, mut bytes) = (begin.len() as u64, Vec::new());
    loop {
        let steps = match from.try_recv() {
            Ok(steps) => steps,
            Err(TryRecvError::Empty) => {
                file.flush()?;
                match from.recv() {
                    Ok(steps) => steps,
                    Err(_) => return Ok(()),
                }
            }
            Err(TryRecvError::Disconnected) => return file.flush(),
        };
        for Step { now, input, outputs } in steps {
            bytes.clear();
            recorder.step(now, input, &outputs, &mut bytes);
            if written + bytes.len() as u64 > limit {
                over.store(true, Ordering::Relaxed);
                tracing::warn!(path = %path.display(), written, "the recording has reached its limit and has ended");
                return file.flush();
            }
            written += bytes.len() as u64;
            file.write_all(&bytes)?;
        }
    }
}
