package sqlite

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// ErrLocked: another process holds the lock.
var ErrLocked = errors.New("locked")

// Lock is exclusive among processes on one machine; the kernel releases it when its holder ends, however it ends.
type Lock struct{ f *os.File }

// TakeLock takes the lock file at path or fails with ErrLocked and the holder's own words. path must not be a database:
// see the package comment.
func TakeLock(path, holder string) (*Lock, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		defer f.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		b := make([]byte, 256)
		n, _ := f.Read(b)
		if who := strings.TrimSpace(string(b[:n])); who != "" {
			return nil, fmt.Errorf("%s: %w by %s", path, ErrLocked, who)
		}
		return nil, fmt.Errorf("%s: %w", path, ErrLocked) // by one that is just writing its words
	}
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt([]byte(holder+"\n"), 0)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return &Lock{f}, nil
}

// Release gives the lock up. The file stays: removing it would let two processes hold locks on two files of one name.
func (l *Lock) Release() error { return l.f.Close() }
