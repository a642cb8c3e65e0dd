package sqlite

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
)

// stuckAfter is how long one group may be in the writer's hands before Health says that nothing goes on: twice what it
// waits for another process's transaction.
const stuckAfter = 10 * time.Second

// failedFor is how long a commit that failed counts, if nobody has tried again since: a step that could not be committed
// is tried again within seconds.
const failedFor = 15 * time.Second

// leastRoom is what a disk has to have left: with less than that the next commit may well fail.
const leastRoom = 256 << 10

// Health fails when the file is gone or cannot be read, when its writer has been at one group for more than ten seconds (a
// disk that hangs, say), when the last commit failed and that was seconds ago, or when the disk has no room left. ctx bounds
// the read.
func (s *Store) Health(ctx context.Context) error {
	if err := s.Check(); err != nil {
		return err
	}
	var seq int64
	if err := s.Get(ctx, "SELECT commit_seq FROM meta WHERE id = 1", nil, &seq); err != nil {
		return fmt.Errorf("read %s: %w", filepath.Base(s.path), err)
	}
	if s.writer == nil {
		return nil
	}
	now := s.writer.o.Clocks.Wall()
	if since := s.writer.since.Load(); since != nil && now.Sub(*since) > stuckAfter {
		return fmt.Errorf("a commit to %s has been under way for %s", filepath.Base(s.path), now.Sub(*since).Round(time.Second))
	}
	if f := s.writer.broken.Load(); f != nil && now.Sub(f.at) < failedFor {
		return fmt.Errorf("the last commit to %s failed: %w", filepath.Base(s.path), f.err)
	}
	if room, err := s.room(); err != nil {
		return fmt.Errorf("look at the disk of %s: %w", filepath.Base(s.path), err)
	} else if room < leastRoom {
		return fmt.Errorf("%w: %.0f KiB are left for %s", ErrFull, room/1024, filepath.Base(s.path))
	}
	return nil
}

// room is how many bytes are left on the file system, for this user; infinite where it has no size, as some that are
// served by a program say of themselves.
func (s *Store) room() (float64, error) {
	var disk unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(s.path), &disk); err != nil {
		return 0, err
	}
	return left(&disk, os.Geteuid() == 0), nil
}

func left(disk *unix.Statfs_t, superuser bool) float64 {
	switch {
	case disk.Blocks == 0:
		return math.Inf(1)
	case superuser: // what is kept for it counts
		return float64(disk.Bfree) * float64(disk.Bsize)
	}
	return float64(disk.Bavail) * float64(disk.Bsize)
}

var (
	descBytes = prometheus.NewDesc("postrider_store_bytes", "Size of the database, without its write-ahead log.", nil, nil)
	descWAL   = prometheus.NewDesc("postrider_store_wal_bytes", "Size of the database's write-ahead log.", nil, nil)
	descFree  = prometheus.NewDesc("postrider_store_free_bytes", "Space left on the database's file system.", nil, nil)
)

// Describe implements prometheus.Collector.
func (s *Store) Describe(ch chan<- *prometheus.Desc) {
	ch <- descBytes
	ch <- descWAL
	ch <- descFree
}

// Collect implements prometheus.Collector: the figures are looked up at each scrape, and no file is opened for them.
func (s *Store) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	gauge := func(desc *prometheus.Desc, value float64, err error) {
		if err != nil {
			ch <- prometheus.NewInvalidMetric(desc, err)
			return
		}
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value)
	}
	var size int64
	err := s.Get(ctx, "SELECT (SELECT page_count FROM pragma_page_count) * (SELECT page_size FROM pragma_page_size)", nil, &size)
	gauge(descBytes, float64(size), err)
	var wal int64
	fi, err := os.Stat(s.path + "-wal")
	if err == nil {
		wal = fi.Size()
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	gauge(descWAL, float64(wal), err)
	room, err := s.room()
	gauge(descFree, room, err)
}
