//! The process and its disk, as the system tells them. What it does not tell is left out.

use std::path::Path;

use super::text::Page;

/// Looks at most at so many files of a store's folder.
const FILES: usize = 10_000;

/// What the system says. Reading it may wait for a disk that does not answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Facts {
    resident_bytes: Option<u64>,
    threads: Option<u64>,
    open_files: Option<u64>,
    open_files_max: Option<u64>,
    cpu_seconds: Option<f64>,
    disk_free: Option<u64>,
    disk_total: Option<u64>,
    disk_used: Option<u64>,
}

impl Facts {
    pub fn read(folder: Option<&Path>) -> Facts {
        let mut facts = Facts::default();
        if let Ok(status) = std::fs::read_to_string("/proc/self/status") {
            facts.resident_bytes = field(&status, "VmRSS:").map(|kib| kib * 1_024);
            facts.threads = field(&status, "Threads:");
        }
        if let Ok(limits) = std::fs::read_to_string("/proc/self/limits") {
            facts.open_files_max = field(&limits, "Max open files");
        }
        // The folder's own descriptor is one of those counted.
        facts.open_files = std::fs::read_dir("/proc/self/fd").ok().map(|all| (all.count() as u64).saturating_sub(1));
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        facts.cpu_seconds = Some(used.tv_sec as f64 + used.tv_nsec as f64 / 1e9);
        if let Some(folder) = folder {
            if let Ok(space) = rustix::fs::statvfs(folder) {
                facts.disk_free = Some(space.f_bavail.saturating_mul(space.f_frsize));
                facts.disk_total = Some(space.f_blocks.saturating_mul(space.f_frsize));
            }
            facts.disk_used = used_by(folder);
        }
        facts
    }

    pub(super) fn write(&self, page: &mut Page) {
        let rows: [(&'static str, &str, &str, Option<u64>); 7] = [
            ("leasehold_process_resident_bytes", "gauge", "Memory of the process.", self.resident_bytes),
            ("leasehold_process_threads", "gauge", "Threads of the process.", self.threads),
            ("leasehold_process_open_files", "gauge", "File descriptors in use.", self.open_files),
            ("leasehold_process_open_files_max", "gauge", "File descriptors allowed.", self.open_files_max),
            ("leasehold_disk_free_bytes", "gauge", "Free space of the store's file system.", self.disk_free),
            ("leasehold_disk_size_bytes", "gauge", "Size of the store's file system.", self.disk_total),
            ("leasehold_disk_used_bytes", "gauge", "Space that the store's folder takes.", self.disk_used),
        ];
        for (name, kind, help, value) in rows {
            page.begin(name, kind, help);
            if let Some(value) = value {
                page.sample(&[], value);
            }
        }
        page.begin("leasehold_process_cpu_seconds_total", "counter", "Processor time that was used.");
        if let Some(seconds) = self.cpu_seconds {
            page.sample(&[], seconds);
        }
    }
}

/// The first number after a name at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Blocks that the files of a folder take; unknown if there are too many to look at.
fn used_by(folder: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt as _;
    let mut folders = vec![folder.to_owned()];
    let (mut bytes, mut seen) = (0, 0);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).ok()?.flatten() {
            seen += 1;
            if seen > FILES {
                return None;
            }
            // A file may be deleted between the listing and the look.
            let Ok(meta) = entry.metadata() else { continue };
            if meta.is_dir() {
                folders.push(entry.path());
            } else {
                bytes += meta.blocks() * 512;
            }
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_tells() {
        let folder = std::env::temp_dir();
        let facts = Facts::read(Some(&folder));
        assert!(facts.resident_bytes.is_some_and(|b| b > 100_000), "{facts:?}");
        assert!(facts.open_files.is_some_and(|n| n >= 3) && facts.threads.is_some_and(|n| n >= 1), "{facts:?}");
        assert!(facts.disk_free.is_some() && facts.disk_total >= facts.disk_free, "{facts:?}");
        assert_eq!(field("VmRSS:\t  12 kB\nThreads:\t3\n", "Threads:"), Some(3));
        assert_eq!(field("Max open files   unlimited  unlimited", "Max open files"), None);
    }
}
