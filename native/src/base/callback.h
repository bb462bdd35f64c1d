// Marks threads that run a callback of the API's user, so that a call that would wait for it is refused.

#pragma once

namespace pyorch {

inline thread_local int callback_depth = 0;

inline bool in_callback() { return callback_depth > 0; }

// Lives during each call of a user's function.
class CallbackScope {
public:
    CallbackScope() { ++callback_depth; }
    ~CallbackScope() { --callback_depth; }

    CallbackScope(const CallbackScope &)             = delete;
    CallbackScope & operator=(const CallbackScope &) = delete;
};

} // namespace pyorch
