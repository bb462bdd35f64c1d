// Mutexes that clang checks: `make lint` runs its thread safety analysis. To gcc the annotations are nothing.
//
// GUARDED_BY(mutex) marks a field that is read and written under the mutex, REQUIRES(mutex) a function whose caller
// holds it. A class that works under its owner's mutex has no name for that: its functions take a `const Locked &`,
// which only a holder of a mutex gets. The analysis looks at one function at a time, and not at constructors and
// destructors. A lambda is a function: if it reads a guarded field, it bears REQUIRES itself.

#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>

#ifdef __clang__
#define PYORCH_ANNOTATION(x) __attribute__((x))
#else
#define PYORCH_ANNOTATION(x)
#endif

#define CAPABILITY(name) PYORCH_ANNOTATION(capability(name))
#define SCOPED_CAPABILITY PYORCH_ANNOTATION(scoped_lockable)
#define GUARDED_BY(mutex) PYORCH_ANNOTATION(guarded_by(mutex))
#define PT_GUARDED_BY(mutex) PYORCH_ANNOTATION(pt_guarded_by(mutex))
#define REQUIRES(...) PYORCH_ANNOTATION(requires_capability(__VA_ARGS__))
#define REQUIRES_SHARED(...) PYORCH_ANNOTATION(requires_shared_capability(__VA_ARGS__))
#define ACQUIRE(...) PYORCH_ANNOTATION(acquire_capability(__VA_ARGS__))
#define ACQUIRE_SHARED(...) PYORCH_ANNOTATION(acquire_shared_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) PYORCH_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define RELEASE(...) PYORCH_ANNOTATION(release_capability(__VA_ARGS__))
#define RELEASE_SHARED(...) PYORCH_ANNOTATION(release_shared_capability(__VA_ARGS__))
#define ASSERT_CAPABILITY(mutex) PYORCH_ANNOTATION(assert_capability(mutex))
#define NO_THREAD_SAFETY_ANALYSIS PYORCH_ANNOTATION(no_thread_safety_analysis)

namespace pyorch {

// Proves that a mutex is held. See Mutex::locked().
class Locked {
    friend class Mutex;
    Locked()                           = default;
    Locked(const Locked &)             = delete;
    Locked & operator=(const Locked &) = delete;
};

class CAPABILITY("mutex") Mutex : private Locked {
public:
    void lock() ACQUIRE() { mutex.lock(); }
    bool try_lock() TRY_ACQUIRE(true) { return mutex.try_lock(); }
    void unlock() RELEASE() { mutex.unlock(); }

    // An argument for functions of a class that works under this mutex.
    const Locked & locked() const REQUIRES(this) { return *this; }

    // In such a function: tells the analysis that the mutex is held.
    void assert_held(const Locked &) const ASSERT_CAPABILITY(this) {}

    // The same in a callback whose caller has no `Locked` to pass. Nothing checks it: say why it is so.
    void assert_held() const ASSERT_CAPABILITY(this) {}

private:
    friend class CondVar;
    std::mutex mutex;
};

class SCOPED_CAPABILITY MutexLock {
public:
    explicit MutexLock(Mutex & mutex) ACQUIRE(mutex) : mutex(mutex) { mutex.lock(); }
    MutexLock(Mutex & mutex, std::adopt_lock_t) REQUIRES(mutex) : mutex(mutex) {} // after try_lock()
    ~MutexLock() RELEASE() {
        if (holds) {
            mutex.unlock();
        }
    }

    MutexLock(const MutexLock &)             = delete;
    MutexLock & operator=(const MutexLock &) = delete;

    // Unlocks before the end of the scope.
    void unlock() RELEASE() {
        mutex.unlock();
        holds = false;
    }

private:
    Mutex & mutex;
    bool    holds = true;
};

// Unlocks a mutex for a scope.
class SCOPED_CAPABILITY MutexUnlock {
public:
    explicit MutexUnlock(Mutex & mutex) RELEASE(mutex) : mutex(mutex) { mutex.unlock(); }
    ~MutexUnlock() RELEASE() { mutex.lock(); } // at the end of any scope clang wants RELEASE

    MutexUnlock(const MutexUnlock &)             = delete;
    MutexUnlock & operator=(const MutexUnlock &) = delete;

private:
    Mutex & mutex;
};

// Any number of readers, or one writer.
class CAPABILITY("mutex") SharedMutex {
public:
    void lock() ACQUIRE() { mutex.lock(); }
    void unlock() RELEASE() { mutex.unlock(); }
    void lock_shared() ACQUIRE_SHARED() { mutex.lock_shared(); }
    void unlock_shared() RELEASE_SHARED() { mutex.unlock_shared(); }

private:
    std::shared_mutex mutex;
};

class SCOPED_CAPABILITY WriteLock {
public:
    explicit WriteLock(SharedMutex & mutex) ACQUIRE(mutex) : mutex(mutex) { mutex.lock(); }
    ~WriteLock() RELEASE() { mutex.unlock(); }

    WriteLock(const WriteLock &)             = delete;
    WriteLock & operator=(const WriteLock &) = delete;

private:
    SharedMutex & mutex;
};

class SCOPED_CAPABILITY ReadLock {
public:
    explicit ReadLock(SharedMutex & mutex) ACQUIRE_SHARED(mutex) : mutex(mutex) { mutex.lock_shared(); }
    ~ReadLock() RELEASE() { mutex.unlock_shared(); }

    ReadLock(const ReadLock &)             = delete;
    ReadLock & operator=(const ReadLock &) = delete;

private:
    SharedMutex & mutex;
};

// std::condition_variable for a Mutex. Conditions are lambdas that bear REQUIRES(mutex).
class CondVar {
public:
    void wait(Mutex & mutex) REQUIRES(mutex) {
        Adopted lock(mutex);
        changed.wait(lock);
    }

    template <typename Condition>
    void wait(Mutex & mutex, Condition condition) REQUIRES(mutex) {
        Adopted lock(mutex);
        changed.wait(lock, condition);
    }

    template <typename Time>
    void wait_until(Mutex & mutex, const Time & time) REQUIRES(mutex) {
        Adopted lock(mutex);
        changed.wait_until(lock, time);
    }

    // False: the condition did not come true.
    template <typename Time, typename Condition>
    bool wait_until(Mutex & mutex, const Time & time, Condition condition) REQUIRES(mutex) {
        Adopted lock(mutex);
        return changed.wait_until(lock, time, condition);
    }

    template <typename Duration, typename Condition>
    bool wait_for(Mutex & mutex, const Duration & duration, Condition condition) REQUIRES(mutex) {
        Adopted lock(mutex);
        return changed.wait_for(lock, duration, condition);
    }

    void notify_one() { changed.notify_one(); }
    void notify_all() { changed.notify_all(); }

private:
    // For std::condition_variable. The caller's lock stays.
    struct Adopted : std::unique_lock<std::mutex> {
        explicit Adopted(Mutex & mutex) : std::unique_lock<std::mutex>(mutex.mutex, std::adopt_lock) {}
        ~Adopted() { release(); }
    };

    std::condition_variable changed;
};

} // namespace pyorch
